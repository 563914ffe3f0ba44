"""The environment variables of a shell that uses the lab, and the group_vars for the lab's workers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from tpu_ops.lab import shared
from tpu_ops.lab.api.catalogue import ZONES
from tpu_ops.lab.containers import CACHE_MOUNT
from tpu_ops.lab.instance import PROJECT, USER, Endpoints, Instance

#: File on the lab's workers with the environment variables that replace a real pod's metadata.
WORKER_ENVIRONMENT = "/etc/tpu-lab/environment"


def variables(
    lab: Instance, endpoints: Endpoints, fleet_inventory: Path | None, tool_config: Path, keys: Collection[str] = ()
) -> dict[str, str]:
    """Return the environment variables for ansible, tpu_ops and gcloud.

    Args:
        lab: The lab.
        endpoints: The endpoints of the lab's API.
        fleet_inventory: The fleet's file; None means the lab's own fleet file, which sets no keys.
        tool_config: The ansible.cfg of this clone, for a fleet directory without an ansible.cfg.
        keys: The keys that the fleet's file sets. If zones or snapshot is among them, the lab's value overrides it.
    """
    own = lab.inventory_file.parent / "tpu_vm.yml"
    file = fleet_inventory or own
    fleet = file.parent.parent if file.parent.name == own.parent.name else file.parent
    own_config = fleet / "ansible.cfg"
    return {
        "TPU_OPS_LAB": lab.name,
        "TPU_OPS_ENDPOINT": endpoints.grpc,
        "TPU_OPS_REST_ENDPOINT": endpoints.rest,
        "TPU_OPS_PROJECT": PROJECT,
        "TPU_OPS_USER": USER,
        "TPU_OPS_PRIVATE_KEY": str(lab.private_key),
        # TPU_OPS_FLEET is the fleet's directory if the fleet's file has the default name.
        "TPU_OPS_FLEET": str(fleet if file.parts[-2:] == own.parts[-2:] else file),
        **({"TPU_OPS_ZONES": ",".join(ZONES)} if "zones" in keys else {}),
        **({"TPU_OPS_SNAPSHOT": "api"} if "snapshot" in keys else {}),
        # Without ANSIBLE_CONFIG, Ansible would find plugins and roles only if started in the clone; in other
        # directories, the inventory would be empty.
        "ANSIBLE_CONFIG": str(own_config if own_config.is_file() else tool_config),
        "ANSIBLE_INVENTORY": f"{file},{lab.inventory_file}",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{endpoints.rest}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{endpoints.rest}/compute/v1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{endpoints.rest}/storage/v1/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "1",
        "CLOUDSDK_CORE_PROJECT": PROJECT,
        "CLOUDSDK_CONFIG": str(lab.directory / "gcloud"),
        "STORAGE_EMULATOR_HOST": endpoints.rest,
        # A path that does not exist: a command that does not use the lab's endpoint fails instead of reaching the real
        # API.
        "GOOGLE_APPLICATION_CREDENTIALS": str(lab.directory / "no-credentials.json"),
    }


def last_fleet(lab: Instance) -> Path | None:
    """Return the fleet's file of the shell that last used this lab; None if there is no such file.

    The lab's workers are configured with the users and settings of this fleet.
    """
    try:
        file = Path(os.fsdecode(lab.fleet_file.read_bytes()))
    except OSError:
        return None
    return file if file.is_file() else None


def remember_fleet(lab: Instance, file: Path) -> None:
    """Store the path of a shell's fleet file for the next shell, which might be opened in another directory."""
    # Ignore errors such as a full disk: only a later shell would use the stored path.
    with contextlib.suppress(OSError):
        shared.replace(lab.fleet_file, os.fsencode(file))


def write_inventory(lab: Instance, environ: Mapping[str, str] = os.environ) -> None:
    """Write the lab's inventory files, which Ansible reads in addition to the fleet's inventory.

    The files are JSON, which is also valid YAML. Their variables override the fleet's group_vars; docs/lab.md lists
    these variables.
    """
    bundle = shared.certificate_bundle(environ)
    public_key = lab.private_key.with_suffix(".pub").read_text().strip()
    group_vars = {
        "base_ca_certificates": [str(bundle)] if bundle else [],
        # Debian's Python is new enough for JAX; Ubuntu 22.04's Python is too old.
        "python_source": "{{ 'deadsnakes' if ansible_facts['distribution_version'] == '22.04' else 'distribution' }}",
        "python_version": "3.12",
        # All workers are on this machine, so they share one cache of downloads.
        "python_uv_cache_dir": f"{CACHE_MOUNT}/uv",
        "python_share_downloads": False,
        "jax_platform": "cpu",
        "launcher_environment_files": [WORKER_ENVIRONMENT],
        # Containers use this machine's kernel, which might have no NFS client; a container cannot load the kernel
        # module.
        "nfs_client_units_only": True,
        # nfs-ganesha 5 (in Debian 13, "trixie") needs a capability that root in a container lacks, unless this option
        # is set. Older versions do not know the option.
        "nfs_ganesha_core": (
            "{{ {'allow_set_io_flusher_fail': true} if ansible_facts['distribution_release'] == 'trixie' else {} }}"
        ),
        "users_more_people": [
            {
                "name": "ada",
                "comment": "Ada of the lab",
                "keys": [public_key],
                "sudo": "launcher",
                "shell": "/usr/bin/zsh",
            }
        ],
    }
    folder = lab.inventory_file.parent
    _write(lab.inventory_file, {"all": {}})
    _write(folder / "group_vars" / "all.yml", group_vars)
    _write(folder / "tpu_vm.yml", {"plugin": "tpu_vm"})


def _write(path: Path, value: object) -> None:
    shared.replace(path, (json.dumps(value, indent=2) + "\n").encode())
