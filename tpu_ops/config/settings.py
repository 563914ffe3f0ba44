"""What a fleet's settings are, and which keys its file may have."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from tpu_ops.cloud.auth import Auth

#: Where a fleet directory keeps its file.
FLEET_FILE = Path("inventory/tpu_vm.yml")

#: Keys of the file that say what the fleet is and how its workers are reached: `Settings` holds them.
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

#: Keys of the file that only the inventory plugin reads (its own, `constructed` and `inventory_cache`).
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

#: Those of them that are true or false.
PLUGIN_FLAGS = ("strict", "leading_separator", "use_extra_vars", "cache")

#: Names of google.cloud.tpu.v2.Node.State that a filter may name.
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

#: Seconds that one API call may take, its retries included.
REQUEST_TIMEOUT = 60.0

#: The same where an endpoint on this machine is set: nothing is far away, and one that hangs should be seen soon.
LOCAL_TIMEOUT = 20.0


class Filters(NamedTuple):
    """Which nodes of the projects and zones belong to the fleet; what is empty lets all pass.

    Attributes:
        names: Patterns (``*``, ``?``, ``[...]``) of node names.
        labels: Label -> the values it may have; no value means that the label must be there.
        accelerator_types: Patterns of accelerator types, as in ``v4-*``.
    """

    names: tuple[str, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    accelerator_types: tuple[str, ...] = ()

    def match(self, name: str, label: str, accelerator_type: str, labels: Mapping[str, str]) -> bool:
        """Given a node's name, unique label, accelerator type and labels, return whether it belongs to the fleet."""
        return (
            (not self.names or any(fnmatchcase(text, form) for form in self.names for text in (name, label)))
            and (
                not self.accelerator_types
                or any(fnmatchcase(accelerator_type, form) for form in self.accelerator_types)
            )
            and all(key in labels and (not values or labels[key] in values) for key, values in self.labels)
        )


class Settings(NamedTuple):
    """What a fleet's file and the environment say, checked.

    Attributes:
        path: The fleet directory: that of the file, or the one above where that is an `inventory`.
        file: The file that was read.
        projects: Project ids without repetition; asking the API needs at least one, a published snapshot none.
        zones: Zones to ask; empty means all.
        endpoint: ``host:port`` of a plaintext gRPC endpoint on loopback; empty means the real service.
        request_timeout: Seconds that one API call may take, its retries included; by default less at an endpoint.
        states: States of the nodes that the inventory lists.
        connect_with: ``external`` and ``internal`` in order of preference.
        user: Login name on the workers.
        private_key: The person's private key, or None where the ssh client should find one by itself.
        more_keys: Further keys that ssh offers, where none was named.
        only_key: Whether the private key was named, so that ssh offers no others of an agent.
        state_dir: Where this fleet's snapshot, ssh config and known_hosts are kept. A file that is not a fleet
            directory's `inventory/tpu_vm.yml` has a state of its own.
        auth: Credentials for the real service.
        strict_permissions: Whether a project or zone that cannot be listed is an error though others can.
        snapshot: Where a published snapshot is read from instead of the API; empty means the API.
        filters: Which nodes belong to the fleet.
        proxy_jump: Worker or other host through which workers are reached that have no external address; may be empty.
        iap: Whether these are reached through Identity-Aware Proxy, by gcloud.
        forward_agent: Whether the written ssh config forwards the person's ssh agent.
        learn_host_keys: Whether the inventory plugin learns the host keys of nodes that it has not seen.
        login: Name of the login that a shell has set for itself alone (user, key, jump), where the file has another:
            what ssh reads for it is kept apart. Else empty.
        shared: The same settings with the file's login, which other shells have; None where there is none apart.
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
    # Settings | None, which `typing` would compile.
    shared: Any = None


def folder_of(file: Path) -> Path:
    """Return how a fleet is named, given its file: by its directory, or by a file that is called otherwise."""
    return file.parents[1] if file.parts[-2:] == FLEET_FILE.parts else file
