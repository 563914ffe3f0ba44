"""Program that computes what hosts need to run a playbook on themselves. `values.compute` starts it.

    python -m tpu_ops.ansible.worker_values PLAYBOOK [OPTION ...] <HOSTS

The options are those of ansible-playbook. Standard input is one JSON object: `hosts`, a list of host patterns, where
none means all hosts; and `secrets`, whether secrets may be among the values. Standard output is one JSON object: the
attributes of `values.Values`, or `error`.

Ansible's own command line class reads options, vault passwords, inventory and plugins, so all of them mean the same
here as in ansible-playbook.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ansible import constants, context
from ansible.cli import CLI
from ansible.cli.playbook import PlaybookCLI
from ansible.errors import AnsibleError
from ansible.parsing.vault import AnsibleVaultError, EncryptedString, is_encrypted_file
from ansible.playbook import Playbook
from ansible.plugins.loader import add_all_plugin_dirs
from ansible.template import Templar, is_trusted_as_template
from ansible.vars.hostvars import HostVars

#: Part (`inventory` or `extra`) and variable -> value, for one host.
HostValues = dict[tuple[str, str], Any]

#: Variables about the way from the controller to a host. A host needs no way to itself.
WAY = r"ansible_(?:host|port|user|connection|ssh_\w+|private_key\w*)"
#: A template that reads files, programs or the environment of the controller, or what is known only there.
OF_CONTROLLER = re.compile(
    rf"\b(?:lookup|query|q)\s*\(|(?<!\.)\b(?:hostvars|groups|inventory_dir|inventory_file|{WAY})\b"
)
#: A template that reads files, programs or the environment of the controller.
LOOKUP = re.compile(r"\b(?:lookup|query|q)\s*\(")
#: A template that may contain secrets: it reads other hosts, programs, the environment or other things than files.
SECRETIVE = re.compile(
    r"(?<!\.)\bhostvars\b|\b(?:lookup|query|q)\s*\("
    r"(?!\s*['\"](?:ansible\.builtin\.)?(?:file|fileglob|first_found|template|vars|varnames)['\"])"
)
#: Beginning of a Jinja template, variable or comment.
TEMPLATE = re.compile(r"\{[{%#]")
#: A word that may be the name of a variable.
WORD = re.compile(r"[A-Za-z_]\w*")
#: File of a role that lists under `controller` what only the controller can compute.
ABOUT = Path("meta", "tpu_ops.yml")


@dataclass(frozen=True)
class Unsafe:
    """A string that looks like a template, and that Ansible must not template."""

    text: str


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc] # PyYAML decides at run time
    """Writes YAML of values that Ansible has tagged, without aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True: values that occur twice are written twice."""
        return True


for _kind, _represent in yaml.SafeDumper.yaml_representers.items():
    if _kind is not None:
        Dumper.add_multi_representer(_kind, _represent)  # Ansible's tagged values are of subclasses.
# PyYAML's emitter in C takes no subclass of str.
Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))
Dumper.add_representer(Unsafe, lambda dumper, value: dumper.represent_scalar("!unsafe", str.__str__(value.text)))


class HostError(Exception):
    """A value of a host cannot be computed on the controller."""


def final(value: Any, leaf: Callable[[str], Any]) -> Any:
    """Return a value of plain types, given a function that returns the final form of each string."""
    if isinstance(value, Mapping):
        return {key: final(each, leaf) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [final(each, leaf) for each in value]
    if isinstance(value, EncryptedString):
        value = str(value)  # decrypts
    return leaf(value) if isinstance(value, str) else value


def literal(text: str) -> str | Unsafe:
    """Return the final form of a string that is no template."""
    return Unsafe(text) if TEMPLATE.search(text) else text


class Program(PlaybookCLI):  # type: ignore[misc] # Ansible ships no types
    """ansible-playbook, except that no play is run."""

    def values(self, patterns: Sequence[str], *, secrets: bool = True) -> dict[str, Any]:
        """Return what the hosts that match the patterns need, as the attributes of `values.Values`."""
        CLI.run(self)  # reads the options, and finds Ansible's plugins
        file = Path(context.CLIARGS["args"][0]).resolve()
        add_all_plugin_dirs(str(file.parent))
        loader, inventory, manager = self._play_prereqs()
        loader.set_basedir(str(file.parent))
        HostVars(inventory, manager, loader)  # gives the manager the variable `hostvars`
        plays = Playbook.load(str(file), variable_manager=manager, loader=loader).get_plays()
        hosts = {host.name: host for host in inventory.get_hosts(list(patterns) or "all")}
        found: dict[str, HostValues] = {}
        cannot: dict[str, list[str]] = {}
        for play in plays:
            loader.set_basedir(play._included_path or str(file.parent))
            play.post_validate(Templar(loader, manager.get_vars(play=play)))
            of_play = OfPlay(play, loader, manager, secrets=secrets)
            for host in inventory.get_hosts(play.hosts):
                if host.name in hosts:
                    try:
                        add(found.setdefault(host.name, {}), of_play.values(host))
                    except HostError as exc:
                        cannot.setdefault(host.name, []).append(str(exc))
        cannot |= {name: [f"no play of {file.name} is for this host"] for name in hosts if name not in found}
        found = {name: found[name] for name in hosts if name not in cannot}
        common = in_common(list(found.values()))
        own = {host: {key: each[key] for key in each if key not in common} for host, each in found.items()}
        return {
            "shared": [dumped({"all": {"vars": of_part("inventory", common)}}), dumped(of_part("extra", common))],
            "hosts": {
                host: [dumped(one_host(hosts[host], of_part("inventory", each))), dumped(of_part("extra", each))]
                for host, each in own.items()
            },
            "cannot": cannot,
        }


def add(before: HostValues, now: HostValues) -> None:
    """Add the values of a host in a play to those of earlier plays.

    Raises:
        HostError: A variable has another value in an earlier play.
    """
    if differ := sorted(name for part, name in before.keys() & now if before[part, name] != now[part, name]):
        raise HostError(f"two plays give different values to {', '.join(differ)}")
    before |= now


class OfPlay:
    """Computes the values of hosts in one play."""

    def __init__(self, play: Any, loader: Any, manager: Any, *, secrets: bool) -> None:
        self._play, self._loader, self._manager, self._secrets = play, loader, manager, secrets
        self._roles = roles_of(play)
        if not secrets:
            for role in self._roles.values():
                manager.extra_vars.update(role.get("secrets", {}))
        # Ansible's own variables, and extra variables: they are no variables of the inventory.
        self._not_of_hosts = {
            *manager.get_vars(include_hostvars=False),
            *constants.INTERNAL_STATIC_VARS,
            "ansible_local",
        }
        # Most hosts share the objects of variables, so the work on each object is done once. The keys are their ids.
        # The objects are kept, so that no other object gets the same id.
        # Value and final form, if the controller computes no part of the value.
        self._fixed: dict[int, tuple[Any, Any]] = {}
        # Value, its text, and the words in the text.
        self._texts: dict[int, tuple[Any, str, frozenset[str]]] = {}
        # Variable of a role, and what its templates read (see `_read`) -> its value.
        self._known: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}
        self._check = check_of(Path(loader.get_basedir()))
        # Variables file -> its variables, if it is encrypted.
        self._encrypted: dict[str, set[str]] = {}
        # Variables files of a host -> what is wrong with them.
        self._faults: dict[str, list[str]] = {}

    def values(self, host: Any) -> HostValues:
        """Return the variables of a host.

        Raises:
            HostError: The controller cannot compute one of them, or a task has to run there.
        """
        variables = self._manager.get_vars(play=self._play, host=host)
        listed = self._manager.get_vars(host=host, include_hostvars=False)
        if not self._secrets:
            hidden = self._hidden(variables, listed)
            self._refuse_needed(hidden, variables, listed)
            variables, listed = (
                {name: value for name, value in each.items() if name not in hidden} for each in (variables, listed)
            )
        if self._check:
            files = str(self._check.variable_paths(variables))
            if files not in self._faults:
                self._faults[files] = self._check.faults(variables, self._loader)
            if self._faults[files]:
                raise HostError("; ".join(self._faults[files]))
        templar = Templar(self._loader, variables)
        for role in self._roles.values():
            for name, why in role.get("tasks", {}).items():
                if self._computed(templar, name, variables.get(name)):
                    raise HostError(f"{name}: {why}")
        found: HostValues = {
            ("inventory", name): self._kept(templar, name, value)
            for name, value in listed.items()
            if name not in self._not_of_hosts and not re.fullmatch(WAY, name)
        }
        for name, value in self._manager.extra_vars.items():
            found["extra", name] = self._kept(templar, name, value)
        for path, role in self._roles.items():
            for name in role.get("values", []):
                if name not in variables:
                    raise AnsibleError(f"{path}/{ABOUT}: controller: the role has no variable {name}")
                key = (name, frozenset(self._read(name, variables).items()))
                if key not in self._known:
                    self._known[key] = self._computed(templar, name, variables[name], path)
                found["extra", name] = self._known[key]
        return found

    def _hidden(self, variables: Mapping[str, Any], listed: Mapping[str, Any]) -> set[str]:
        """Return the inventory's variables that may be secret.

        They are encrypted, alone or with their file, or are the user's own and read a lookup, another host, or a
        variable that may be secret. The variable of a role may be secret if it looks up more than a file.

        Args:
            variables: All variables of a host.
            listed: Those of its inventory.
        """
        if not self._check:
            raise AnsibleError("only playbooks that check variables, as those of tpu_ops do, tell what may be secret")
        own = listed.keys() - self._check.known
        found = {name for name, value in listed.items() if is_encrypted(value)}
        for name, value in listed.items():
            if isinstance(value, str | list | dict):
                text = repr(value)
                if SECRETIVE.search(text) or (name in own and LOOKUP.search(text)):
                    found.add(name)
        for paths in self._check.variable_paths(variables):
            # Ansible reads the first one only: a file, or all files of a directory.
            for file in [paths[0]] if paths[0].is_file() else filter(Path.is_file, sorted(paths[0].rglob("*"))):
                if str(file) not in self._encrypted:
                    with file.open("rb") as opened:
                        locked = is_encrypted_file(opened)
                    self._encrypted[str(file)] = set(self._loader.load_from_file(str(file)) or ()) if locked else set()
                found |= self._encrypted[str(file)]
        for name in own - found:
            if TEMPLATE.search(repr(listed[name])) and self._read(name, variables).keys() & found:
                found.add(name)
        return found - set(self._manager.extra_vars)

    def _refuse_needed(self, hidden: set[str], variables: Mapping[str, Any], listed: Mapping[str, Any]) -> None:
        """Raise HostError if a role needs a variable that may be secret."""
        needed = {name for role in self._roles.values() for name in role.get("values", ()) if name in variables}
        needed |= {name for name in listed if self._check and name in self._check.known}
        for name in sorted(needed - set(self._manager.extra_vars)):
            # Without a template, a word that is also the name of a variable has no meaning.
            read = self._read(name, variables).keys() if TEMPLATE.search(repr(variables[name])) else {name}
            if secret := sorted(read & hidden):
                which = "it" if secret == [name] else f"{', '.join(secret)}, which it needs,"
                raise HostError(
                    f"{name}: {which} may be secret (encrypted, looked up by the controller, or of another host)"
                )

    def _computed(self, templar: Templar, name: str, value: Any, role: str = "") -> Any:
        """Return the value of a template; files are looked for in the role's directory too."""
        of_role = [role, f"{role}/tasks"] if role else []
        templar.available_variables["ansible_search_path"] = [*of_role, self._loader.get_basedir()]
        try:
            return final(templar.template(value), literal)
        except AnsibleVaultError:
            raise
        except AnsibleError as exc:
            raise HostError(f"{name}: the controller cannot compute it: {exc}") from exc

    def _kept(self, templar: Templar, name: str, value: Any) -> Any:
        """Return a value in which only templates of the controller are replaced, by their results."""
        if id(value) in self._fixed:
            return self._fixed[id(value)][1]
        replaced = False

        def leaf(text: str) -> Any:
            nonlocal replaced
            if not TEMPLATE.search(text) or not is_trusted_as_template(text):
                return literal(text)
            if not OF_CONTROLLER.search(text):
                return text
            if "ansible_facts" in text:
                raise HostError(f"{name}: it needs both the controller and facts of the host")
            replaced = True
            return self._computed(templar, name, text)

        done = final(value, leaf)
        if not replaced:
            self._fixed[id(value)] = (value, done)
        return done

    def _read(self, name: str, variables: Mapping[str, Any]) -> dict[str, str]:
        """Return name -> text, for a variable and all others that its templates may read.

        Hosts for which these texts are equal have the same value of the variable.
        """
        found: dict[str, str] = {}
        left = {name}
        while left:
            each = left.pop()
            if each == "vars":  # all variables of the host
                found[each] = variables["inventory_hostname"]
            elif each in variables and each != "hostvars":  # which is the same for all hosts
                value = variables[each]
                if id(value) not in self._texts:
                    text = repr(value)
                    self._texts[id(value)] = (value, text, frozenset(WORD.findall(text)))
                _, found[each], words = self._texts[id(value)]
                left |= words - found.keys()
        return found


def roles_of(play: Any) -> dict[str, Any]:
    """Return path -> what only the controller can compute, for the roles of a play."""
    roles = [each for role in play.get_roles() for each in (*role.get_all_dependencies(), role)]
    files = {str(role._role_path): Path(role._role_path) / ABOUT for role in roles}
    about = {path: yaml.safe_load(file.read_text()) for path, file in files.items() if file.is_file()}
    return {path: each["controller"] for path, each in about.items() if each and "controller" in each}


def is_encrypted(value: Any) -> bool:
    """Return whether a value, or a part of it, is encrypted in its file."""
    if isinstance(value, Mapping):
        return any(map(is_encrypted, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_encrypted, value))
    return isinstance(value, EncryptedString)


def in_common(hosts: Sequence[HostValues]) -> HostValues:
    """Return the values that all hosts have. They are compared by their texts, since 1 equals True."""
    first = hosts[0] if hosts else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in each and (each[key] is value or repr(each[key]) == repr(value)) for each in hosts)
    }


def of_part(part: str, values: HostValues) -> dict[str, Any]:
    """Return the variables of one part, `inventory` or `extra`."""
    return {name: value for (kind, name), value in values.items() if kind == part}


class Check(NamedTuple):
    """The check of variables files of the action `check_variables`, which a worker cannot do: it has no such files.

    Attributes:
        known: Names of the variables of roles.
        variable_paths: Returns the variables files of a host, given its variables.
        faults: Returns what is wrong with these files, given the host's variables and Ansible's loader.
    """

    known: set[str]
    variable_paths: Callable[[Mapping[str, Any]], Any]
    faults: Callable[[Mapping[str, Any], Any], list[str]]


def check_of(playbooks: Path) -> Check | None:
    """Return the check of variables files, given the directory of a playbook; None if its plays do not check them."""
    file = playbooks / "action_plugins" / "check_variables.py"
    specification = importlib.util.spec_from_file_location("check_variables", file)
    if not file.is_file() or specification is None or specification.loader is None:
        return None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    roles = playbooks.parent / "roles"
    options = {name: one for its in module.options_of(roles).values() for name, one in its.items()}
    known = options.keys() | module.offered_by(roles).keys()

    def faults(variables: Mapping[str, Any], loader: Any) -> list[str]:
        found: list[str] = module.file_faults(variables, known, options, loader)
        return found

    return Check(known, module.variable_paths, faults)


def one_host(host: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return an inventory of one host, in all its groups."""
    groups = [group.name for group in host.get_groups() if group.name not in ("all", "ungrouped")]
    own = {**variables, "ansible_connection": "local"}
    return {"all": {"hosts": {host.name: own}, "children": {name: {"hosts": {host.name: None}} for name in groups}}}


def dumped(value: object) -> str:
    """Return YAML that Ansible reads as these values."""
    return str(yaml.dump(value, Dumper=Dumper, allow_unicode=True, width=2**20, sort_keys=False))


def main(arguments: Iterable[str]) -> int:
    """Print the values as JSON. Everything that Ansible itself prints goes to standard error."""
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = Program(["ansible-playbook", *arguments]).values(given["hosts"], secrets=given["secrets"])
        except AnsibleError as exc:
            answer = {"error": str(exc)}
    json.dump(answer, sys.stdout)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
