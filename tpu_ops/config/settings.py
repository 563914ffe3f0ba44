"""The settings of a fleet, and the keys that the fleet's file can contain."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from tpu_ops.cloud.auth import Auth

#: Path of the fleet's file in a fleet directory.
FLEET_FILE = Path("inventory/tpu_vm.yml")

#: Keys of the file that `Settings` contains: which nodes are in the fleet, and how their workers are reached.
OWN_KEYS = (
    "projects",
    "zones",
    "endpoint",
    "request_timeout",
    "auth_kind",
    "service_account_file",
    "service_account_contents",
    "access_token",
    "strict_permissions",
    "snapshot",
    "names",
    "labels",
    "accelerator_types",
    "states",
    "connect_with",
    "proxy_jump",
    "iap",
    "forward_agent",
    "user",
    "private_key",
    "learn_host_keys",
)

#: Names of the inventory plugin: that of a clone and of `tpu_ops init`, and that of the Ansible collection.
PLUGIN_NAMES = ("tpu_vm", "tpu_ops.fleet.tpu_vm")
#: Keys of the file that only the inventory plugin reads: its own, and those of Ansible's `constructed` and
#: `inventory_cache`.
PLUGIN_KEYS = (
    "plugin",
    "hostnames",
    "include",
    "exclude",
    "hostvars_prefix",
    "hostvars_suffix",
    "python_interpreter",
    "strict",
    "compose",
    "groups",
    "keyed_groups",
    "leading_separator",
    "use_extra_vars",
    "cache",
    "cache_plugin",
    "cache_timeout",
    "cache_connection",
    "cache_prefix",
)

#: Keys among `PLUGIN_KEYS` whose value is a boolean.
PLUGIN_FLAGS = ("strict", "leading_separator", "use_extra_vars", "cache")

#: Names of google.cloud.tpu.v2.Node.State that the key `states` can contain.
STATES = (
    "CREATING",
    "READY",
    "RESTARTING",
    "REIMAGING",
    "DELETING",
    "REPAIRING",
    "STOPPED",
    "STOPPING",
    "STARTING",
    "PREEMPTED",
    "TERMINATED",
    "HIDING",
    "HIDDEN",
    "UNHIDING",
    "UNKNOWN",
)

#: Default seconds for one API call, including retries.
REQUEST_TIMEOUT = 60.0

#: Default seconds for one API call to an endpoint on this machine. Such calls are fast, so a hanging endpoint is
#: noticed soon.
LOCAL_TIMEOUT = 20.0


class Filters(NamedTuple):
    """Which nodes of the projects and zones belong to the fleet; an empty filter matches all nodes.

    Attributes:
        names: Patterns (``*``, ``?``, ``[...]``) of node names.
        labels: Label -> allowed values; a label without values must only exist.
        accelerator_types: Patterns of accelerator types, as in ``v4-*``.
    """

    names: tuple[str, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    accelerator_types: tuple[str, ...] = ()

    def match(self, name: str, label: str, accelerator_type: str, labels: Mapping[str, str]) -> bool:
        """Return whether a node belongs to the fleet, given its name, unique label, accelerator type and labels."""
        return (
            (not self.names or any(fnmatchcase(text, form) for form in self.names for text in (name, label)))
            and (
                not self.accelerator_types
                or any(fnmatchcase(accelerator_type, form) for form in self.accelerator_types)
            )
            and all(key in labels and (not values or labels[key] in values) for key, values in self.labels)
        )


class Settings(NamedTuple):
    """The checked values of a fleet's file and the environment.

    Attributes:
        path: The fleet directory: the directory of the file, or its parent if that directory is `inventory`.
        file: The file that was read.
        projects: Unique project ids. At least one is required, unless a published snapshot is read.
        zones: Zones whose nodes are listed; empty means all zones.
        endpoint: ``host:port`` of a plaintext gRPC endpoint on loopback; empty means the real service.
        request_timeout: Seconds for one API call, including retries; the default is lower for an endpoint.
        states: States of the nodes that the inventory lists.
        connect_with: ``external`` and ``internal`` in order of preference.
        user: Login name on the workers.
        private_key: The user's private key, or None if the ssh client should find one.
        more_keys: Further private keys that ssh offers if no private key is set.
        only_key: Whether a private key is set, so that ssh offers no other keys of an agent.
        state_dir: Directory of this fleet's snapshot, ssh config and known_hosts. A file with another name than
            `inventory/tpu_vm.yml` has its own directory.
        auth: Credentials for the real service.
        strict_permissions: Whether a project or zone that cannot be listed is an error even if others can be.
        snapshot: Source of a published snapshot to read instead of the API; empty means the API.
        filters: Which nodes belong to the fleet.
        proxy_jump: Worker or other host through which workers without external address are reached; empty means none.
        iap: Whether workers without external address are reached through Identity-Aware Proxy, by gcloud.
        forward_agent: Whether the written ssh config forwards the user's ssh agent.
        learn_host_keys: Whether the inventory plugin learns the host keys of new nodes.
        login: Digest of a login (user, key, jump) that the shell sets and that differs from the file's login. It has
            its own ssh files. Empty if there is no such login.
        shared: The same settings with the file's login, which other shells use; None if ``login`` is empty.
        rest_endpoint: Plaintext URL on loopback, as in ``http://127.0.0.1:18471``, of Google Cloud's other services;
            empty means the real services. It belongs to ``endpoint``.
    """

    path: Path
    file: Path
    projects: tuple[str, ...]
    zones: tuple[str, ...]
    endpoint: str
    request_timeout: float
    states: tuple[str, ...]
    connect_with: tuple[str, ...]
    user: str
    private_key: Path | None
    state_dir: Path
    more_keys: tuple[Path, ...] = ()
    only_key: bool = False
    auth: Auth = Auth()
    strict_permissions: bool = False
    snapshot: str = ""
    filters: Filters = Filters()
    proxy_jump: str = ""
    iap: bool = False
    forward_agent: bool = False
    learn_host_keys: bool = True
    login: str = ""
    # The value is a `Settings` or None. The type is `Any`, since `typing` would evaluate `Settings | None`.
    shared: Any = None
    rest_endpoint: str = ""


def folder_of(file: Path) -> Path:
    """Return the value of --fleet for a file: the fleet directory, or the file itself if it has another name."""
    return file.parents[1] if file.parts[-2:] == FLEET_FILE.parts else file
