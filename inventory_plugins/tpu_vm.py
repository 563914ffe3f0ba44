"""Inventory of Cloud TPU VMs: every worker of every node, from the Cloud TPU API."""

from __future__ import annotations

DOCUMENTATION = r"""
name: tpu_vm
short_description: Workers of Cloud TPU VMs
description:
  - Lists every worker (host VM) of every Cloud TPU node in the given projects and zones from the Cloud TPU API.
  - A worker is called C(<node>-w<index>), for example C(pod-w0). Where several nodes share a name, all of them are
    called C(<node>.<zone>-w<index>), and C(<node>.<zone>.<project>-w<index>) where that is still shared.
  - Host keys of new nodes are read from their guest attributes and checked under a name that is bound to the node's id.
    A worker's address may change; its host key may not.
  - The command C(tpu_ops) reads the same file, and both keep one C(ssh_config) and C(known_hosts) up to date.
  - An unknown key is an error. Environment variables win over the file.
author:
  - The tpu_ops authors
extends_documentation_fragment:
  - constructed
  - inventory_cache
requirements:
  - The Python package tpu_ops, in the environment that Ansible runs in.
notes:
  - Text from the API, such as labels and descriptions, is data. It is never evaluated as a template.
  - A project or zone that cannot be listed is a warning that names it as long as another one can. A wrong project is an
    error, never an empty fleet.
  - A worker without an address is listed without C(ansible_host), so that using it fails with its name.
  - With no endpoint set, application default credentials are used (C(gcloud auth application-default login), or
    E(GOOGLE_APPLICATION_CREDENTIALS)).
options:
  plugin:
    description: Marks the file as this plugin's.
    type: str
    required: true
    choices: [tpu_vm]
  projects:
    description:
      - Google Cloud project ids. At least one is needed, here or in E(TPU_OPS_PROJECT) (a comma list).
    type: list
    elements: str
    default: []
  zones:
    description:
      - Zones to list. All zones of the projects when empty. E(TPU_OPS_ZONES) (a comma list) wins over it.
    type: list
    elements: str
    default: []
  states:
    description:
      - States of the nodes to list. Workers of a node in another state cannot serve and are left out.
    type: list
    elements: str
    choices:
      - CREATING
      - READY
      - RESTARTING
      - REIMAGING
      - DELETING
      - REPAIRING
      - STOPPED
      - STOPPING
      - STARTING
      - PREEMPTED
      - TERMINATED
      - HIDING
      - HIDDEN
      - UNHIDING
      - UNKNOWN
    default: [READY]
  connect_with:
    description:
      - Which address to connect to, in order of preference. The first one that a worker has is taken.
    type: list
    elements: str
    choices: [external, internal]
    default: [external, internal]
  user:
    description:
      - Login name on the workers. The local login name when not set, as with gcloud. E(TPU_OPS_USER) wins over it.
    type: str
  private_key:
    description:
      - Private ssh key; a relative path starts at this file. When not set, the first that exists of
        C(~/.ssh/id_ed25519), C(~/.ssh/google_compute_engine) (the one gcloud makes) and C(~/.ssh/id_rsa).
        E(TPU_OPS_PRIVATE_KEY) wins over it.
    type: path
  request_timeout:
    description:
      - Seconds that one call of the API may take, its retries included. 60 where it is not set, 20 with O(endpoint).
    type: float
  endpoint:
    description:
      - C(HOST:PORT) of a plaintext gRPC endpoint that is used without credentials. Only loopback addresses are
        accepted. E(TPU_OPS_ENDPOINT) wins over it.
    type: str
  hostvars_prefix:
    description: Prefix of the host variables.
    type: str
    default: tpu_
"""

EXAMPLES = r"""
# inventory/tpu_vm.yml: every serving worker of one project, in all zones.
plugin: tpu_vm
projects: [my-project]

---
# Two projects, two zones, also nodes that are stopped; internal addresses only.
plugin: tpu_vm
projects: [my-project, our-grant]
zones: [us-central2-b, europe-west4-a]
states: [READY, STOPPED]
connect_with: [internal]
user: ada
private_key: ~/.ssh/id_ed25519

---
# Groups by label, by generation and for first workers; a variable from a label; answers kept for ten minutes.
plugin: tpu_vm
projects: [my-project]
keyed_groups:
  - key: tpu_labels.team | default('none')
    prefix: team
groups:
  first_workers: tpu_is_first_worker
  v4: tpu_accelerator_type is match('v4-')
compose:
  owner: tpu_labels.owner | default('nobody')
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_connection: ~/.cache/tpu_ops/inventory
cache_timeout: 600

# Built-in groups: node_<name>, zone_<zone>, type_<accelerator type>, state_<state>; other characters than letters,
# digits and underscores become underscores: node_pod, zone_us_central2_b, type_v4_32, state_ready.
#
# Host variables, with what they are for worker 1 of the node "pod":
#
# ansible_host: 34.90.12.7            # the address by connect_with
# ansible_user: ada
# ansible_ssh_private_key_file: /home/ada/.ssh/id_ed25519
# ansible_ssh_common_args: -o HostKeyAlias=tpu-8066102453917220011-w1 -o UserKnownHostsFile=... -o ControlPath=...
# tpu_host: pod-w1                    # its name for tpu_ops and in the written ssh config
# tpu_node: pod                       # name in the API
# tpu_node_label: pod                 # name in this fleet, unique
# tpu_node_id: "8066102453917220011"  # another one for a node made anew under the same name
# tpu_worker_index: 1
# tpu_worker_count: 4
# tpu_is_first_worker: false
# tpu_project: my-project
# tpu_zone: us-central2-b
# tpu_region: us-central2
# tpu_accelerator_type: v4-32
# tpu_chips: 16                       # of the whole slice; 0 for a type that is not known
# tpu_chips_per_worker: 4
# tpu_topology: 2x2x4
# tpu_runtime_version: tpu-ubuntu2204-base
# tpu_state: READY
# tpu_health: HEALTHY
# tpu_health_description: ""
# tpu_symptoms: []                    # of this worker: {worker_id, type, details, create_time}
# tpu_labels: {team: vision}
# tpu_internal_ip: 10.130.0.12
# tpu_external_ip: 34.90.12.7
# tpu_internal_ips: [10.130.0.11, 10.130.0.12, 10.130.0.13, 10.130.0.14]   # of all workers, in order
# tpu_external_ips: [34.90.12.6, 34.90.12.7, 34.90.12.8, 34.90.12.9]
# tpu_queued_resource: ""             # name of the one that made the node
# tpu_slice_index: null               # of a node that is one of several slices: its index among them, from 0
# tpu_preemptible: false              # preemptible or spot
# tpu_spot: false
# tpu_reserved: false
# tpu_data_disks: [{source: projects/my-project/zones/us-central2-b/disks/data, mode: READ_ONLY}]
# tpu_service_account: 123456-compute@developer.gserviceaccount.com
# tpu_create_time: "2026-11-02T09:14:31Z"
# tpu_instance_name: ""               # Compute Engine instance; asked for only with iap
# tpu_host_key_alias: tpu-8066102453917220011-w1
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError, AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.template import trust_as_template

try:
    from tpu_ops import config
    from tpu_ops.errors import OpsError
    from tpu_ops.fleet import hostvars, ssh_files, view
    from tpu_ops.fleet.model import Node, Worker, workers_of
    from tpu_ops.fleet.reach import Way
except ImportError as exc:
    IMPORT_ERROR: ImportError | None = exc
else:
    IMPORT_ERROR = None

#: Form of what is cached; another form is not read.
CACHE_VERSION = 1


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):  # type: ignore[misc] # Ansible ships no types
    """Options in, workers out; everything between is `tpu_ops`."""

    NAME = "tpu_vm"

    def verify_file(self, path: str) -> bool:
        return bool(super().verify_file(path)) and path.endswith(("tpu_vm.yml", "tpu_vm.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path, cache)
        if IMPORT_ERROR is not None:
            raise AnsibleParserError(
                f"the package tpu_ops cannot be imported ({IMPORT_ERROR}): run Ansible from the environment it is "
                "installed in (.venv/bin/ansible-inventory after `make env`)"
            )
        try:
            # Checked before Ansible looks at it: Ansible passes over keys that it does not know.
            settings = config.load_file(Path(path))
            self._read_config_data(path)
            nodes = self._nodes(settings, path, cache)
            self._populate(settings, nodes)
        except OpsError as failure:
            raise AnsibleParserError(str(failure)) from failure

    def _nodes(self, settings: config.Settings, path: str, cache: bool) -> list[Node]:
        """Return the nodes from the cache where it may and can answer, else from the API."""
        caching = self.get_option("cache")
        key = f"{self.get_cache_key(path)}_{_digest(settings)}"
        if caching and cache:
            nodes = self._cached(settings, key)
            if nodes is not None:
                return nodes
        fleet, changes = view.refresh(settings, learn=settings.learn_host_keys)
        for text in fleet.warnings:
            self.display.warning(text)
        for text in changes.news():
            self.display.v(f"tpu_vm: {text}")
        if caching:
            # Written only here, after the API was asked: an answer from the cache never renews its own age.
            self._cache[key] = {"version": CACHE_VERSION, "nodes": [node.to_json() for node in fleet.scope]}
        return list(fleet.scope)

    def _cached(self, settings: config.Settings, key: str) -> list[Node] | None:
        """Return the cached nodes; None where there are none, they are damaged, or their host keys are not known."""
        try:
            data = self._cache[key]
            if data["version"] != CACHE_VERSION:
                return None
            nodes = [Node.from_json(entry) for entry in data["nodes"]]
        except KeyError:
            return None
        except (AnsibleError, ValueError, TypeError) as exc:
            self.display.vv(f"tpu_vm: the cached answer is damaged and is not used: {exc}")
            return None
        serving = [worker for worker in workers_of(nodes) if worker.node.state in settings.states]
        return nodes if view.has_keys(settings, serving) else None

    def _populate(self, settings: config.Settings, nodes: list[Node]) -> None:
        prefix = self.get_option("hostvars_prefix")
        strict = self.get_option("strict")
        groups = hostvars.groups(nodes)
        workers = view.selected(settings, nodes)[1]
        ways = view.ways_of(settings, workers)
        shared = ssh_files.arguments(view.ssh_options(settings))
        for worker in workers:
            if worker.node.state not in settings.states:
                continue
            self.inventory.add_host(worker.host)
            for group in groups[worker.node.full_name]:
                self.inventory.add_group(group)
                self.inventory.add_child(group, worker.host)
            variables = {f"{prefix}{name}": value for name, value in hostvars.facts(worker).items()}
            variables |= self._connection(settings, worker, ways.of(worker), shared)
            for name, value in variables.items():
                self.inventory.set_variable(worker.host, name, _plain(value))
            self._set_composite_vars(self.get_option("compose"), variables, worker.host, strict=strict)
            self._add_host_to_composed_groups(self.get_option("groups"), variables, worker.host, strict=strict)
            self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, worker.host, strict=strict)

    def _connection(self, settings: config.Settings, worker: Worker, way: Way, shared: str) -> dict[str, str]:
        """Return how Ansible reaches a worker: the same options that ssh_config holds."""
        variables = {
            "ansible_user": settings.user,
            "ansible_ssh_common_args": f"{ssh_files.arguments(ssh_files.own_options(worker, way))} {shared}",
        }
        if settings.private_key is not None:
            variables["ansible_ssh_private_key_file"] = str(settings.private_key)
        if way.address:
            variables["ansible_host"] = way.address
        else:
            self.display.warning(f"worker {worker.host} {way.problem}")
        return variables


def _plain(value: Any) -> Any:
    """Return a value in which text that cannot be a template is marked as safe to evaluate.

    `ansible-inventory --list` writes every unmarked text as an object instead of a string. Text that holds as much as
    the beginning of a template, or the header that would redefine what a template is, stays unmarked: Ansible never
    evaluates it.
    """
    if isinstance(value, str):
        return value if "{" in value or "#" in value else trust_as_template(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _digest(settings: config.Settings) -> str:
    """Return a digest of what decides the API's answer, so that another question never gets this one's answer."""
    asked = json.dumps([settings.endpoint, sorted(settings.projects), sorted(settings.zones)])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
