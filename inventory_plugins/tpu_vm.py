"""Inventory of Cloud TPU VMs: every worker of every node, from the Cloud TPU API."""

from __future__ import annotations

DOCUMENTATION = r"""
name: tpu_vm
short_description: Workers of Cloud TPU VMs
description:
  - Lists every worker (host VM) of the Cloud TPU nodes in the given projects and zones, from the Cloud TPU API.
  - A worker is called C(<node>-w<index>), for example C(pod-w0). If several nodes share a name, their workers are
    called C(<node>.<zone>-w<index>), and C(<node>.<zone>.<project>-w<index>) if nodes of several projects share the
    zone too.
  - Host keys of new nodes are read from their guest attributes and checked under a name that is bound to the node's id.
    A worker's address may change; its host key may not.
  - The command C(tpu_ops) reads the same file. The options that it shares (projects, filters, credentials and
    connections) may be written as templates, with lookups but without variables. Environment variables win over the
    file, and an unknown key is an error.
author:
  - The tpu_ops authors
extends_documentation_fragment:
  - constructed
  - inventory_cache
requirements:
  - The Python package tpu-ops, in the environment that Ansible runs in.
notes:
  - The file's name ends in C(tpu_vm.yml) or C(tpu_vm.yaml); in a fleet directory it is C(inventory/tpu_vm.yml).
  - Text from the API, such as labels and descriptions, is data. No template, call, filter or lookup in it is ever run,
    wherever the text is used. Only in a task that evaluates a text twice, text that is the name of a variable becomes
    the value of this variable.
  - If a project or zone cannot be listed but another one can, a warning names it; see O(strict_permissions). A wrong
    project is an error, never an empty fleet.
  - A worker without an address is listed, with a warning, and cannot be reached.
  - With O(cache) on, the newest answer that is no older than O(cache_timeout) is used, either the cached one or the
    snapshot that C(tpu_ops refresh) and the other commands write. Because of this snapshot, C(cache=true) needs only
    the default cache plugin. C(--flush-cache) and C(meta=refresh_inventory) ask the API and write both cache and
    snapshot. If a project or zone could not be listed, each use of this answer warns of it; with O(strict_permissions)
    the answer is not used.
options:
  plugin:
    description:
      - Marks the file as one of this plugin. With the collection tpu_ops.fleet, use the full name; all commands of
        tpu_ops know both names.
    type: str
    required: true
    choices: [tpu_vm, tpu_ops.fleet.tpu_vm]
  projects:
    description:
      - Google Cloud project ids. To ask the API, at least one is needed, here or in E(TPU_OPS_PROJECT) (separated by
        commas), which wins over this option. A published snapshot contains the ids of its projects.
    type: list
    elements: str
    default: []
    env:
      - name: TPU_OPS_PROJECT
  zones:
    description:
      - Zones to list; all zones of the projects when empty. E(TPU_OPS_ZONES) (separated by commas) wins over this
        option.
    type: list
    elements: str
    default: []
    env:
      - name: TPU_OPS_ZONES
  names:
    description:
      - Patterns (C(*), C(?), C([...])) of node names. A name is C(<node>); if several nodes share it, a pattern can
        also match C(<node>.<zone>). The fleet consists of the nodes that match one of the patterns, or of all nodes
        when empty.
      - This filter, O(labels) and O(accelerator_types) apply to the commands as well as to the inventory.
    type: list
    elements: str
    default: []
  labels:
    description:
      - Labels that a node of the fleet must have, all of them. Each label is mapped to its value, to a list of possible
        values, or to nothing if any value will do.
    type: dict
    default: {}
  accelerator_types:
    description: Patterns of accelerator types, for example C(v4-*). A node of the fleet must match one of them.
    type: list
    elements: str
    default: []
  states:
    description:
      - States of the nodes to list. Workers can only be used while their node is READY.
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
  include:
    description:
      - Expressions over a host's variables, written without braces as in O(groups). A host stays in the inventory if
        any of them is true.
      - These expressions narrow this inventory only. Filters that apply to the commands as well are O(names),
        O(labels), O(accelerator_types), O(projects) and O(zones).
      - An expression that fails for a worker counts as false, with a warning. With O(strict), or if the expression
        fails for every worker, this is an error. Anything that is not an expression is always an error.
    type: list
    elements: str
    default: []
  exclude:
    description:
      - Expressions like those of O(include). A host stays in the inventory only if none of them is true.
    type: list
    elements: str
    default: []
  hostnames:
    description:
      - Inventory host names. Each entry is the name of a host variable, another expression, or a template with braces.
        The first entry whose result is a text that is not empty is used; without such an entry, C(<node>-w<index>).
      - A result that is not valid as a host's name, or is the name of a host from another source, is skipped with a
        warning. Two workers with the same name are an error, even if one of them is from another fleet's file.
      - The commands and the written ssh config keep C(<node>-w<index>), which is the variable C(tpu_host).
    type: list
    elements: str
    default: []
  hostvars_prefix:
    description:
      - Prefix of the host variables that this plugin adds, except those with the prefix C(ansible_). With another
        prefix, or with a suffix, the variables that the roles and playbooks read also keep their usual names, such as
        C(tpu_node).
    type: str
    default: tpu_
  hostvars_suffix:
    description: Suffix of the host variables to which O(hostvars_prefix) applies.
    type: str
    default: ""
  connect_with:
    description:
      - Which address to connect to, in order of preference. The first one that a worker has is used.
    type: list
    elements: str
    choices: [external, internal]
    default: [external, internal]
  proxy_jump:
    description:
      - Host through which workers are reached if their internal address is used. This is a worker of the fleet, for
        example C(pod-w0), or any C([user@]host[:port]) that your own ssh knows. E(TPU_OPS_PROXY_JUMP) wins over it.
    type: str
    env:
      - name: TPU_OPS_PROXY_JUMP
  iap:
    description:
      - Whether workers are reached through Identity-Aware Proxy if their internal address is used. This needs the
        command C(gcloud), logged in. It cannot be combined with O(proxy_jump).
    type: bool
    default: false
  forward_agent:
    description:
      - Whether the ssh config that C(tpu_ops) writes forwards your ssh agent to the workers. Ansible does not forward
        it, even if your own ssh config does so for all hosts; C(-A) in E(ANSIBLE_SSH_ARGS) makes Ansible forward it.
    type: bool
    default: false
  user:
    description:
      - Login name on the workers. When not set, it is your local login name, as with gcloud. E(TPU_OPS_USER) wins over
        this option.
    type: str
    env:
      - name: TPU_OPS_USER
  private_key:
    description:
      - Private ssh key; a relative path starts at this file. When not set, ssh offers the existing ones of
        C(~/.ssh/id_ed25519), C(~/.ssh/google_compute_engine) (made by gcloud) and C(~/.ssh/id_rsa), and C(tpu_ops
        create) adds the first of them to new nodes. If it is set, ssh offers only this key, and no others of your
        agent. E(TPU_OPS_PRIVATE_KEY) wins over it.
    type: path
    env:
      - name: TPU_OPS_PRIVATE_KEY
  python_interpreter:
    description:
      - Python on the workers that runs Ansible's modules. As a variable of each host it wins over group_vars; if it
        is empty, group_vars or Ansible decide.
    type: str
    default: /usr/bin/python3
  learn_host_keys:
    description:
      - Whether to ask the API for host keys of READY nodes that are not known yet. If false, new nodes can be used only
        after C(tpu_ops refresh).
    type: bool
    default: true
  auth_kind:
    description:
      - Credentials for the API. C(application) takes application default credentials
        (C(gcloud auth application-default login), or E(GOOGLE_APPLICATION_CREDENTIALS)), C(serviceaccount) a service
        account's key, C(accesstoken) a token. E(GCP_AUTH_KIND) wins over it.
    type: str
    choices: [application, serviceaccount, accesstoken]
    default: application
    env:
      - name: GCP_AUTH_KIND
  service_account_file:
    description:
      - Key file of the service account; a relative path starts at this file. E(GCP_SERVICE_ACCOUNT_FILE) wins over it.
    type: path
    env:
      - name: GCP_SERVICE_ACCOUNT_FILE
  service_account_contents:
    description:
      - Key of the service account as JSON text. Cannot be combined with O(service_account_file), unless one of the two
        is an environment variable, which wins. Do not write it into the file; use E(GCP_SERVICE_ACCOUNT_CONTENTS) or a
        lookup.
    type: str
    env:
      - name: GCP_SERVICE_ACCOUNT_CONTENTS
  access_token:
    description:
      - OAuth 2.0 access token. Do not write it into the file; use E(GCP_ACCESS_TOKEN), for example with the output of
        C(gcloud auth print-access-token), or a lookup.
    type: str
    env:
      - name: GCP_ACCESS_TOKEN
  strict_permissions:
    description:
      - Whether a project or zone that cannot be listed is an error even if others can be listed.
    type: bool
    default: false
  request_timeout:
    description:
      - Seconds that one API call may take, retries included. The default is 60, or 20 with O(endpoint).
    type: float
  endpoint:
    description:
      - C(HOST:PORT) of a plaintext gRPC endpoint that is used without credentials. Only loopback addresses are
        accepted. E(TPU_OPS_ENDPOINT) wins over it.
    type: str
    env:
      - name: TPU_OPS_ENDPOINT
  snapshot:
    description:
      - A published snapshot of the fleet, which is read instead of the API. It needs no Google Cloud credentials except
        for the place where it is stored. A path, an C(https) URL, C(gs://bucket/object) or C(ssh:HOST[:PATH]).
        C(tpu_ops snapshot --publish) writes it. C(api) means that the API is asked, even after C(tpu_ops refresh
        --from). E(TPU_OPS_SNAPSHOT) wins over it.
    type: str
    env:
      - name: TPU_OPS_SNAPSHOT
"""

EXAMPLES = r"""
# inventory/tpu_vm.yml: every READY worker of one project, in all zones.
plugin: tpu_vm
projects: [my-project]

---
# Two projects, two zones, stopped nodes too; only nodes that are labelled for these teams.
plugin: tpu_vm
projects: [my-project, our-grant]
zones: [us-central2-b, europe-west4-a]
states: [READY, STOPPED]
labels: {team: [vision, speech]}
user: ada
private_key: ~/.ssh/id_ed25519

---
# Workers without external addresses, reached through a host that has one.
plugin: tpu_vm
projects: [my-project]
connect_with: [internal]
proxy_jump: ada@bastion.example.org

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
cache_timeout: 600

---
# Only nodes of several workers, without those labelled private; hosts are named after the label alias if it is set.
plugin: tpu_vm
projects: [my-project]
include:
  - tpu_worker_count > 1
exclude:
  - "'private' in tpu_labels"
hostnames:
  - "{{ tpu_labels.alias }}-{{ tpu_worker_index }}"
  - tpu_host

---
# A project from an environment variable, and a service account's key from another file.
plugin: tpu_vm
projects: ["{{ lookup('env', 'TEAM_PROJECT') }}"]
auth_kind: serviceaccount
service_account_contents: "{{ lookup('file', '~/keys/lister.json') }}"

# Built-in groups: node_<name>, zone_<zone>, type_<accelerator type>, state_<state>, queued_<queued resource>; other
# characters than letters, digits and underscores become underscores: node_pod, zone_us_central2_b, type_v4_32,
# state_ready.
#
# Host variables, with their values for worker 1 of the node "pod":
#
# ansible_host: 34.90.12.7            # the address that connect_with chooses
# ansible_user: ada
# ansible_python_interpreter: /usr/bin/python3
# ansible_ssh_private_key_file: /home/ada/.ssh/id_ed25519
# ansible_ssh_common_args: -o HostKeyAlias=tpu-8066102453917220011-w1 -o ControlPath=... -F none -o UserKnownHosts...
# tpu_host: pod-w1                    # the worker's name for tpu_ops and in the written ssh config
# tpu_node: pod                       # name in the API
# tpu_node_label: pod                 # name in this fleet, unique
# tpu_node_id: "8066102453917220011"  # changes when the node is recreated under the same name
# tpu_worker_index: 1
# tpu_worker_count: 4
# tpu_is_first_worker: false
# tpu_project: my-project
# tpu_zone: us-central2-b
# tpu_region: us-central2
# tpu_accelerator_type: v4-32
# tpu_chips: 16                       # of the whole slice; 0 if the type is unknown
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
# tpu_queued_resource: ""             # name of the queued resource that created the node
# tpu_slice_index: null               # index of the node among several slices, from 0
# tpu_preemptible: false              # preemptible or spot
# tpu_spot: false
# tpu_reserved: false
# tpu_data_disks: [{source: projects/my-project/zones/us-central2-b/disks/data, mode: READ_ONLY}]
# tpu_service_account: 123456-compute@developer.gserviceaccount.com
# tpu_create_time: "2026-11-02T09:14:31Z"
# tpu_instance_name: ""               # Compute Engine instance; known only with iap
# tpu_host_key_alias: tpu-8066102453917220011-w1
"""

import functools
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError, AnsibleParserError, AnsibleUndefinedVariable
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.template import trust_as_template
from ansible.utils.vars import combine_vars

try:
    from tpu_ops import config, texts
    from tpu_ops.cloud.node import SERVING_STATES, Node, Worker
    from tpu_ops.errors import OpsError, UsageError
    from tpu_ops.fleet import composed, hostnames, hostvars, selection, view
    from tpu_ops.fleet.state import Snapshot, question_of
    from tpu_ops.ssh import client_config, host_keys, ways
    from tpu_ops.ssh.ways import Way
except ImportError as exc:
    IMPORT_ERROR: ImportError | None = exc
else:
    IMPORT_ERROR = None

#: Version of the cached data; other versions are not read.
CACHE_VERSION = 2

#: Text that cannot contain a call, a filter or a template.
HARMLESS = re.compile(r"[\w .:/@+,-]*")

#: Options that are lists of expressions; Ansible itself would split a single expression at its commas.
EXPRESSIONS = ("hostnames", "include", "exclude")


@dataclass(frozen=True)
class Host:
    """A worker as an inventory host."""

    name: str
    worker: Worker
    variables: dict[str, Any]


class Choice:
    """Decides which workers become hosts, and the hosts' names, with the expressions in the fleet's file."""

    def __init__(self, plugin: InventoryModule, file: Path, groups: set[str], others: frozenset[str]) -> None:
        self._templar = plugin.templar
        self._hostnames, self._include, self._exclude = (plugin.get_option(name) for name in EXPRESSIONS)
        self._strict = plugin.get_option("strict")
        self._extra = plugin.extra_variables()
        self._file, self._groups, self._others = file, groups, others
        self._taken = hostnames.Taken(f"{file}, key 'hostnames'")
        self._passed_over: dict[tuple[str, str], list[str]] = {}
        # Key of the file -> number of workers for which its expressions were evaluated.
        self._decided = {"include": 0, "exclude": 0}

    def stays(self, worker: Worker, variables: dict[str, Any]) -> bool:
        """Return whether a worker matches an expression of `include`, if there are any, and none of `exclude`."""
        if not self._include and not self._exclude:
            return True
        self._see(variables)
        self._decided["include"] += 1
        if self._include and not any(self._holds("include", expression, worker) for expression in self._include):
            return False
        self._decided["exclude"] += 1
        return not any(self._holds("exclude", expression, worker) for expression in self._exclude)

    def name(self, worker: Worker, variables: dict[str, Any]) -> str:
        """Return the first valid result of the entries of `hostnames`, else the worker's own name.

        Raises:
            UsageError: Another worker already has that name.
        """
        if not self._hostnames:
            return worker.host
        self._see(variables)
        name = next(filter(None, (self._rendered(entry, worker) for entry in self._hostnames)), worker.host)
        self._taken.add(name, worker.host)
        return name

    def warnings(self) -> list[str]:
        """Return one warning per expression that failed or gave no name.

        Raises:
            UsageError: An expression of `include` or `exclude` failed for every worker.
        """
        for (key, expression), reasons in self._passed_over.items():
            if len(reasons) == self._decided.get(key):
                raise UsageError(
                    f"{expression!r} fails for every worker: {reasons[0]}",
                    where=f"{self._file}, key {key!r}",
                    fix="correct it; if a label is missing on some, write tpu_labels.team | default('') == 'vision'",
                )
        return [
            f"{self._file}, key {key!r}, {expression!r}: {reasons[0]}"
            + (f"; it was skipped for {len(reasons) - 1} other workers, too" if len(reasons) > 1 else "")
            for (key, expression), reasons in self._passed_over.items()
        ]

    def _see(self, variables: dict[str, Any]) -> None:
        self._templar.available_variables = combine_vars(variables, self._extra) if self._extra else variables

    def _holds(self, key: str, expression: str, worker: Worker) -> bool:
        try:
            return bool(self._templar.evaluate_conditional(expression))
        except AnsibleError as exc:
            self._failed(key, expression, worker, exc)
            return False

    def _rendered(self, entry: str, worker: Worker) -> str:
        template = self._templar.is_template(entry)
        try:
            found = self._templar.template(entry) if template else self._templar.evaluate_expression(entry)
        except AnsibleUndefinedVariable:
            return ""
        except AnsibleError as exc:
            self._failed("hostnames", entry, worker, exc)
            return ""
        if found is None or found == "":
            return ""
        # Another source may define a host with the worker's own name, to add variables to it.
        others = () if found == worker.host else self._others
        if problem := hostnames.problem(found, self._groups, others):
            self._pass_over("hostnames", entry, worker, problem)
            return ""
        return str(found)

    def _failed(self, key: str, expression: str, worker: Worker, exc: AnsibleError) -> None:
        if self._strict:
            raise AnsibleParserError(
                f"{self._file}, key {key!r}, {expression!r} fails for worker {worker.host}: {exc}"
            ) from exc
        self._pass_over(key, expression, worker, str(exc))

    def _pass_over(self, key: str, expression: str, worker: Worker, reason: str) -> None:
        self._passed_over.setdefault((key, expression), []).append(f"{reason} (worker {worker.host})")


class Said(logging.Handler):
    """Passes log messages of tpu_ops to Ansible's display."""

    def __init__(self, display: Any, named: Callable[[str], str]) -> None:
        super().__init__()
        self._display, self._named = display, named

    def emit(self, record: logging.LogRecord) -> None:
        """Show a log message on standard error."""
        if record.levelno >= logging.WARNING:
            self._display.warning(self._named(record.getMessage()))
        else:
            self._display.display(f"tpu_vm: {self._named(record.getMessage())}", stderr=True)


@contextmanager
def heard(display: Any, named: Callable[[str], str]) -> Iterator[None]:
    """Show log messages of tpu_ops through Ansible for the duration of the block.

    Args:
        display: Ansible's display.
        named: Adds the option --fleet to the commands in a message.
    """
    log, said = logging.getLogger("tpu_ops"), Said(display, named)
    level = log.level
    log.addHandler(said)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(said)
        log.setLevel(level)


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):  # type: ignore[misc] # Ansible ships no types
    """Converts options and workers for Ansible; `tpu_ops` does the rest."""

    NAME = "tpu_vm"

    inventory: Any
    #: A function that returns the option --fleet for the commands in messages.
    _option: Callable[[], str] = staticmethod(str)

    def verify_file(self, path: str) -> bool:
        return bool(super().verify_file(path)) and path.endswith(("tpu_vm.yml", "tpu_vm.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path, cache)
        if IMPORT_ERROR is not None:
            raise AnsibleParserError(
                f"the Python package tpu-ops cannot be imported ({IMPORT_ERROR}): install it in the environment that "
                "Ansible runs in (`pip install tpu-ops`), or run Ansible from the environment that has it "
                "(.venv/bin/ansible-inventory after `make env`)"
            )
        try:
            # Check the file before Ansible reads it: Ansible ignores unknown keys.
            settings = config.load_file(Path(path))
            self._option = functools.cache(lambda: config.fleet_option(settings.file))
            self._read_options(path)
            with heard(self.display, self._on_fleet):
                nodes = self._nodes(settings, path, cache)
            self._add(settings, nodes)
        except OpsError as failure:
            # Without `from None`, Ansible would print the causes of the error twice.
            raise AnsibleParserError(self._on_fleet(str(failure))) from None

    def _on_fleet(self, text: str) -> str:
        """Add the option --fleet to the commands in a text."""
        return texts.on_fleet(text, self._option)

    def _read_options(self, path: str) -> None:
        """Read the options that only the plugin uses; `tpu_ops.config` reads the others, for the commands as well."""
        data = self.loader.load_from_file(path, cache="none", trusted_as_template=True)
        options = {key: data[key] for key in config.PLUGIN_KEYS if key in data}
        for key in EXPRESSIONS:
            listed = [options[key]] if isinstance(options.get(key), str) else options.get(key) or []
            if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
                raise UsageError(
                    "expected a list of strings", where=f"{path}, key {key!r}", fix="put each string in quotes"
                )
            options[key] = listed
        try:
            self.set_options(direct=options, var_options=self._vars)
        except AnsibleError as exc:
            raise UsageError(str(exc), where=path, fix="`ansible-doc -t inventory tpu_vm` has examples") from exc
        self._check_syntax(path)
        if not self._variable("x").isidentifier():
            raise UsageError(
                f"{self._variable('<name>')!r} is not valid as the name of a variable",
                where=f"{path}, key 'hostvars_prefix' or 'hostvars_suffix'",
                fix="use letters, digits and underscores; do not begin with a digit",
            )
        if self._variable("x").startswith("ansible_"):
            raise UsageError(
                f"{self._variable('host')!r} is one of Ansible's own variables, or may become one",
                where=f"{path}, key 'hostvars_prefix'",
                fix="use a prefix that does not begin with ansible_",
            )
        if self.get_option("cache"):
            try:
                self.load_cache_plugin()
            except (AnsibleError, ImportError) as exc:
                raise UsageError(
                    f"the cache cannot be used: {exc}",
                    where=f"{path}, key 'cache_plugin' or 'cache_connection'",
                    fix="leave both keys out: the fleet's snapshot is a cache already",
                ) from exc

    def _check_syntax(self, path: str) -> None:
        """Reject expressions with invalid syntax, which Ansible would silently skip."""
        for key in ("include", "exclude"):
            for expression in self.get_option(key):
                self._check_condition(expression, f"{path}, key {key!r}")
        for name, expression in (self.get_option("groups") or {}).items():
            self._check_condition(expression, f"{path}, key 'groups', {name!r}")
        for name, expression in (self.get_option("compose") or {}).items():
            composed.check_syntax(str(expression), f"{path}, key 'compose', {name!r}")
        for number, entry in enumerate(self.get_option("keyed_groups") or (), 1):
            if isinstance(entry, dict) and "key" in entry:
                composed.check_syntax(str(entry["key"]), f"{path}, key 'keyed_groups', entry {number}")

    def _check_condition(self, expression: Any, where: str) -> None:
        # A condition that is a template is not checked: its syntax differs from that of an expression.
        if isinstance(expression, str) and not self.templar.is_template(expression):
            composed.check_syntax(expression, where)

    def extra_variables(self) -> dict[str, Any]:
        """Return the variables of the command line (-e) if `use_extra_vars` is on, else none."""
        return dict(self._vars) if self.get_option("use_extra_vars") else {}

    def _variable(self, name: str) -> str:
        return f"{self.get_option('hostvars_prefix')}{name}{self.get_option('hostvars_suffix')}"

    def _variables(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return facts as host variables; variables that roles or playbooks read also keep their usual names."""
        values = {name: _plain(value) for name, value in facts.items()}
        usual = {f"tpu_{name}": values[name] for name in values.keys() & hostvars.READ_BY_ROLES}
        return {self._variable(name): value for name, value in values.items()} | usual

    def _nodes(self, settings: config.Settings, path: str, cache: bool) -> Sequence[Node]:
        """Return the nodes from the cache or the snapshot if one of these is usable, else from the API."""
        caching = self.get_option("cache")
        key = f"{self.get_cache_key(path)}_{_digest(settings)}"
        if caching and cache and (known := self._remembered(settings, key)) is not None:
            for text in (*known.warnings, *selection.doubts(settings, known.nodes)):
                self.display.warning(self._on_fleet(text))
            return known.nodes
        fleet, changes = view.newest(settings, learn=settings.learn_host_keys)
        for text in fleet.warnings:
            self.display.warning(self._on_fleet(text))
        for text in changes.news():
            self.display.v(f"tpu_vm: {text}")
        if caching:
            # Write the cache only after the API was asked, so that reading the cache never renews its age.
            self._cache[key] = {
                "version": CACHE_VERSION,
                "asked_at": fleet.asked_at,
                "warnings": fleet.unlisted,
                "nodes": [node.to_json() for node in fleet.listed],
            }
        return fleet.listed

    def _remembered(self, settings: config.Settings, key: str) -> Snapshot | None:
        """Return the newer one of the cached answer and the snapshot; None if neither is recent and complete enough."""
        answers = [answer for answer in (self._cached(key), self._snapshot(settings)) if answer is not None]
        young = (answer for answer in answers if self._young(answer.asked_at))
        newest = max(young, key=lambda answer: answer.asked_at, default=None)
        if newest is None or (newest.warnings and settings.strict_permissions):
            return None
        states = set(settings.states).intersection(SERVING_STATES)
        serving = [worker for worker in selection.of(settings, newest.nodes)[1] if worker.node.state in states]
        if settings.learn_host_keys and not host_keys.has_keys(settings, serving):
            return None
        if settings.iap and not all(worker.instance_name for worker in serving):
            return None
        self.display.vv(f"tpu_vm: the API was asked {time.time() - newest.asked_at:.0f} s ago")
        client_config.make_mux_dir(selection.mux_dir())
        return newest

    def _cached(self, key: str) -> Snapshot | None:
        """Return the cached answer of the API; None if there is no answer, or the answer is damaged."""
        try:
            data = self._cache[key]
            if data["version"] != CACHE_VERSION:
                return None
            nodes = tuple(Node.from_json(entry) for entry in data["nodes"])
            return Snapshot(float(data["asked_at"]), nodes, warnings=tuple(map(str, data.get("warnings", ()))))
        except KeyError:
            return None
        except (AnsibleError, ValueError, TypeError, OverflowError) as exc:
            self.display.vv(f"tpu_vm: the cached answer is damaged and is not used: {exc}")
            return None

    def _snapshot(self, settings: config.Settings) -> Snapshot | None:
        """Return the snapshot that `tpu_ops refresh` or another command wrote."""
        fleet = view.known(settings)
        return Snapshot(fleet.asked_at, fleet.listed, fleet.source, fleet.unlisted) if fleet else None

    def _young(self, asked_at: float) -> bool:
        """Return whether an answer is recent enough; its age is counted from the request to the API."""
        timeout, age = self.get_option("cache_timeout"), time.time() - asked_at
        # A negative age means that the clock was set back: the real age is unknown.
        return age >= 0 and (not timeout or age <= timeout)

    def _add(self, settings: config.Settings, nodes: Sequence[Node]) -> None:
        """Add the workers of these nodes to the inventory.

        After an error in `hostnames`, `include` or `exclude`, no host was added. After an error in `compose`, `groups`
        or `keyed_groups`, some hosts were added.
        """
        groups = hostvars.groups(nodes)
        hosts = self._hosts(settings, nodes, {name for names in groups.values() for name in names})
        own: dict[str, list[str]] = {name: [] for names in groups.values() for name in names}
        for host in hosts:
            if there := self.inventory.get_host(host.name):
                hostnames.refuse_another(host.name, host.worker, there.vars, settings.file)
            for group in groups[host.worker.node.full_name]:
                own[group].append(host.name)
        fillings = [
            (said, f"{settings.file}, key {key!r}", add, composed.Composed(self.inventory, own))
            for key, add in (
                ("compose", self._set_composite_vars),
                ("groups", self._add_host_to_composed_groups),
                ("keyed_groups", self._add_host_to_keyed_groups),
            )
            if (said := self.get_option(key))
        ]
        for host in hosts:
            self.inventory.add_host(host.name)
            for group in groups[host.worker.node.full_name]:
                self.inventory.add_group(group)
                self.inventory.add_child(group, host.name)
            # Set the variables on the host itself: Inventory.set_variable would copy every value.
            entry = self.inventory.get_host(host.name)
            for name, value in host.variables.items():
                entry.set_variable(name, value)
            for filling in fillings:
                self._fill(host, *filling)
        for _, where, _, filled in fillings:
            filled.refuse_merged(where)

    def _fill(self, host: Host, said: Any, where: str, add: Callable[..., None], filled: composed.Composed) -> None:
        """Add the variables or groups of one key of the file to a host."""
        inventory, strict = self.inventory, self.get_option("strict")
        self.inventory = filled
        try:
            add(said, host.variables, host.name, strict=strict)
        except Exception as exc:  # Ansible raises a plain Exception for circular groups
            passed_over = "; `strict: false` skips expressions that fail" if strict else ""
            raise UsageError(str(exc), where=where, fix=f"correct it{passed_over}") from exc
        finally:
            self.inventory = inventory

    def _hosts(self, settings: config.Settings, nodes: Sequence[Node], groups: set[str]) -> list[Host]:
        """Return the hosts for the workers of these nodes, with the hosts' names and variables."""
        workers = selection.of(settings, nodes)[1]
        found = selection.ways_of(settings, nodes)
        shared = self._shared(settings)
        options = selection.ansible_arguments(settings)
        choice = Choice(self, settings.file, groups.union(self.inventory.groups), frozenset(self.inventory.hosts))
        hosts: list[Host] = []
        reached: list[tuple[Worker, Way]] = []
        common: dict[str, Any] = {}
        node = None
        for worker in workers:
            if worker.node.state not in settings.states:
                continue
            if worker.node is not node:
                node = worker.node
                common = self._variables(hostvars.node_facts(node))
            way = found.of(worker)
            variables = self._variables(hostvars.worker_facts(worker)) | common | shared
            variables |= self._connection(worker, way, options)
            if choice.stays(worker, variables):
                hosts.append(Host(choice.name(worker, variables), worker, variables))
                reached.append((worker, way))
        # Report nodes without endpoints only if the file lists nodes in states that should have endpoints.
        serves = not set(settings.states).isdisjoint(SERVING_STATES)
        lacking = selection.without_endpoints(settings, nodes) if serves else ()
        for text in (*choice.warnings(), *ways.problems(reached), *lacking):
            self.display.warning(self._on_fleet(text))
        return hosts

    def _connection(self, worker: Worker, way: Way, options: str) -> dict[str, str]:
        """Return the variables with which Ansible connects to a worker; they have the options of the ssh config."""
        own = client_config.arguments(client_config.own_options(worker, way))
        variables = {"ansible_host": ways.host_name(worker, way), "ansible_ssh_common_args": f"{own} {options}"}
        return {name: _own(value) for name, value in variables.items()}

    def _shared(self, settings: config.Settings) -> dict[str, Any]:
        """Return the connection variables that all hosts share."""
        variables = {"ansible_user": settings.user}
        if settings.private_key is not None:
            variables["ansible_ssh_private_key_file"] = str(settings.private_key)
        if interpreter := self.get_option("python_interpreter"):
            variables["ansible_python_interpreter"] = interpreter
        return {name: _own(value) for name, value in variables.items()}


def _plain(value: Any) -> Any:
    """Return a value whose harmless texts are marked as trusted templates.

    `ansible-inventory --list` writes every unmarked text as an object instead of a string. Ansible evaluates a marked
    text if a task evaluates it twice, as in `var: "{{ tpu_labels.x }}"`. Therefore only texts without calls, filters
    and templates are marked; they can be no more than names of variables. Ansible never evaluates unmarked texts.
    """
    if isinstance(value, str):
        return trust_as_template(value) if HARMLESS.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _own(value: str) -> str:
    """Return a text of the plugin, such as a connection variable, marked as trusted unless it looks like a template."""
    return value if "{" in value or "#" in value else trust_as_template(value)


def _digest(settings: config.Settings) -> str:
    """Return a digest of the settings that determine the answer, so that each request has its own cache entry."""
    asked = json.dumps([question_of(settings).to_json(), settings.snapshot])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
