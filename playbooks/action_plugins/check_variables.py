"""Action that finds every fault in one host's variables: `register` it and pass all results to `faults_listed`.

This check is an action and not a filter, since it needs the variables before they are templated: a template that
fails is one more fault, and untemplated values still know their file and line. The worker is neither read nor changed.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ansible import context
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

Options = Mapping[str, Any]

#: Types of argument_specs -> Python types of a valid value. Roles do not convert values: a string in place of a number
#: or a boolean would end the run in the middle of its changes.
KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "dict": (dict,),
    "int": (int,),
    "list": (list,),
    "path": (str,),
    "str": (str,),
}
#: Python types -> words for messages.
WORDS = {bool: "a boolean", dict: "a mapping", float: "a decimal number", int: "a number", list: "a list"}
#: Prefixes of variables that no role defines: Ansible, the inventory plugin or a playbook sets them.
OTHERS = ("_", "ansible_", "tpu_")
#: Similarity (difflib's ratio) from which an unknown name counts as a misspelt variable of a role: for names with a
#: role's prefix, and for other names. At 0.9 a name as long as users_people differs in one or two letters.
ALIKE, VERY_ALIKE = 0.75, 0.9
#: Similarity from which the name of a variables file counts as a misspelt group: teams resembles team, but team_a does
#: not resemble team_b.
ALIKE_GROUP = 0.85
NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))
#: Beginning of a fault: the variable and the keys below it, sometimes followed by a list entry's label and key.
PLACE = re.compile(
    r"(?P<name>[a-z]\w*)(?P<keys>(\[\d+\]|\.\w+)*): ((?P<label>[^:]*): )?(?P<key>\w+)?(\[(?P<index>\d+)\])?"
)

#: Suffixes of variables files, in the order in which Ansible looks for them.
SUFFIXES = ("", ".yml", ".yaml", ".json")

#: The inventory plugin's names for groups and workers. A group or worker exists only as long as its nodes do.
OF_NODES, WORKER = re.compile(r"(node|zone|type|state|queued)_[a-z0-9_]+"), re.compile(r"[^A-Z]+-w\d+")

#: The beginning of a fault that concerns several variables together.
SEVERAL = re.compile(r"[a-z]\w*(, [a-z]\w*)+(?=: )")


#: Ansible's name for the origin of a variable that was set with -e.
EXTRA = "CLI option '-e'"
#: Advice for a variable that was set with -e and has the wrong type.
AS_JSON = "; give it to -e as JSON"
#: The YAML parser in C if available, since every host's check reads all variables files.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Fault(NamedTuple):
    """What is wrong with a variable.

    Attributes:
        text: The variable, keys below it, a colon, and what is wrong.
        blocks: Whether the role's own checks are skipped because of this fault: they would fail, or report false
            faults.
    """

    text: str
    blocks: bool = False


def type_faults(path: str, option: Mapping[str, Any], value: Any, way: str = "") -> list[Fault]:
    """Return every fault of type, choice or key in a variable's value.

    Args:
        path: The variable.
        option: The variable's entry in argument_specs.
        value: The variable's value.
        way: Advice for messages on how to give the variable the right type; empty if none is needed.
    """
    kind = option.get("type", "str")
    if value is None:
        return [Fault(f"{path}: is empty; give it a value or leave it out", blocks=True)]
    fits = isinstance(value, KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if not fits:
        word = _word(value, secret=option.get("no_log", False))
        return [Fault(f"{path}: is {word} and must be {_wanted(option, value, way)}", blocks=True)]
    if kind != "list" and "choices" in option and value not in option["choices"]:
        return [Fault(f"{path}: '{value}' is not one of {', '.join(map(str, option['choices']))}")]
    faults = []
    if kind == "list":
        element = {"type": option["elements"]} | {key: option[key] for key in ("options", "choices") if key in option}
        for position, entry in enumerate(value):
            faults += type_faults(f"{path}[{position}]", element, entry, way)
    elif kind == "dict" and "options" in option:
        known = option["options"]
        for key in value:
            if key in known:
                faults += type_faults(f"{path}.{key}", known[key], value[key], way)
            else:
                near = _suggestion(str(key), known) or f"; the keys are {', '.join(known)}"
                faults.append(Fault(f"{path}.{key}: unknown key{near}"))
        missing = [key for key, inner in known.items() if inner.get("required") and key not in value]
        faults += [Fault(f"{path}: {key} is missing; add it") for key in missing]
    return faults


def _word(value: Any, *, secret: bool) -> str:
    kind = next((kind for kind in WORDS if isinstance(value, kind)), type(value))
    shown = "" if secret or isinstance(value, (dict, list, str)) else f" ({str(value).lower()})"
    return ("a string" if isinstance(value, str) else WORDS.get(kind, kind.__name__)) + shown


def _wanted(option: Mapping[str, Any], value: Any, way: str) -> str:
    kind = option.get("type", "str")
    if kind == "str" and "choices" in option:
        return f"one of {', '.join(map(str, option['choices']))}"
    if kind in ("str", "path"):
        return "a string" if isinstance(value, (dict, list)) else "a string; put it in quotes"
    return {"bool": "true or false", "dict": "a mapping", "int": "an integer", "list": "a list"}[kind] + way


def _suggestion(name: str, known: Iterable[str], cutoff: float = ALIKE) -> str:
    near = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def unknown_faults(
    names: Iterable[str], roles: Collection[str], known: Collection[str], own: Collection[str]
) -> list[str]:
    """Return a fault for each unknown variable whose name looks like that of a role's variable.

    Args:
        names: All variables of a host.
        roles: Names of the roles.
        known: Names of the roles' variables.
        own: The value of facts_own_variables: the user's own variables.
    """
    faults = []
    for name in sorted(names):
        if name in known or name in own or name.startswith(OTHERS):
            continue
        prefixed = name.startswith(tuple(f"{role}_" for role in roles))
        suggestion = _suggestion(name, known, ALIKE if prefixed else VERY_ALIKE)
        if prefixed or suggestion:
            joined = f"{suggestion} If" if suggestion else "; if"
            faults.append(f"{name}: no role has this variable{joined} it is your own, list it in facts_own_variables")
    return faults


def offered_faults(names: Iterable[str], offered: Mapping[str, str]) -> list[str]:
    """Return the variables that the user set although a role sets them for other roles.

    Args:
        names: The host's variables that no role has set.
        offered: Variables that roles set for other roles -> the role. Names that begin with _ are private and are
            ignored.
    """
    return [
        f"{name}: the role {offered[name]} sets this variable for other roles; remove your value"
        for name in sorted(offered.keys() & set(names))
        if not name.startswith("_")
    ]


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def subjects(fault: str) -> list[str]:
    """Given a fault about several variables, return one fault for each of these variables."""
    match = SEVERAL.match(fault)
    return [name + fault[match.end() :] for name in match[0].split(", ")] if match else [fault]


class Places:
    """The file and line of each of a host's variables.

    Ansible knows file and line but does not offer them to plugins, so this class reads the files again. It does so only
    if there is a fault. A variable's place is in the first file that sets its value.
    """

    def __init__(self, values: Mapping[str, Any], files: Iterable[Path], loader: Any) -> None:
        """Store the variables.

        Args:
            values: The variables with their untemplated values.
            files: The files that can set the variables, highest precedence first.
            loader: Ansible's loader, which reads the files.
        """
        self._values = values
        self._files = files
        self._loader = loader

    @cached_property
    def _nodes(self) -> dict[str, tuple[Path, Any]]:
        found: dict[str, tuple[Path, Any]] = {}
        for file in self._files:
            # In an inventory, variables are nested below hosts and groups.
            nested = not {"group_vars", "host_vars"} & set(file.parts)
            for key, node in _pairs(_composed(file, self._loader), nested=nested):
                name = key.value
                if name in self._values and name not in found and _may_be(node, self._values[name]):
                    found[name] = (file, node)
        return found

    @cached_property
    def extra(self) -> set[str]:
        """The variables that were set with -e, except those in files (-e @FILE)."""
        return set(load_extra_vars(self._loader)) - self._nodes.keys()

    def of(self, name: str, steps: Iterable[str | int] = ()) -> str:
        """Return the file and line of a variable, or of a part of its value; empty if unknown.

        Args:
            name: The variable.
            steps: The keys and positions that lead to the part. If one is not found, the place of the last found is
                used.
        """
        if name not in self._nodes:
            return EXTRA if name in self.extra else ""
        file, node = self._nodes[name]
        line = node.start_mark.line
        for step in steps:
            if isinstance(node, yaml.MappingNode):
                pairs = [(key, value) for key, value in node.value if key.value == str(step)]
                if not pairs:
                    break
                line, node = pairs[0][0].start_mark.line, pairs[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line
            else:
                break
        return f"{_shown(file)}:{line + 1}"


def _composed(file: Path, loader: Any) -> Any:
    """Parse a YAML file into nodes, which know their line numbers; return None if the file is not YAML."""
    return _nodes(loader.get_text_file_contents(str(file)).encode())


def _nodes(text: bytes) -> Any:
    """Parse YAML into nodes; return None if the text is not YAML."""
    try:
        return yaml.compose(text, LOADER)
    except yaml.YAMLError:
        return None


def _pairs(node: Any, *, nested: bool = False) -> Iterator[tuple[Any, Any]]:
    """Return the keys and values of a mapping, with `nested` also those of mappings inside it."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
        yield key, value
        if nested:
            yield from _pairs(value, nested=True)


def _may_be(node: Any, value: Any) -> bool:
    """Return whether a YAML node has this value; also True if only Ansible can read the node (an encrypted value)."""
    try:
        return bool(yaml.constructor.SafeConstructor().construct_object(node, deep=True) == value)
    except yaml.YAMLError:
        return True


def place(fault: str, places: Places) -> str:
    """Return the file and line of the value that a fault is about, as exactly as known; empty if unknown."""
    match = PLACE.match(fault)
    if match is None:
        return ""
    steps = [int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|\.(\w+)", match["keys"])]
    # After the variable, a fault can name a key of the list entry, as in `users_people[0]: ada: keys[1] starts with`.
    steps += [match["key"], *([int(match["index"])] if match["index"] else [])] if match["key"] else []
    return places.of(match["name"], steps)


def place_of_first(fault: str, places: Places) -> str:
    """Return the file and line of a fault's first variable that the user set; empty if there is none."""
    return next(filter(None, (place(each, places) for each in subjects(fault))), "")


def with_places(fault: str, places: Places) -> str:
    """Insert file and line after each list entry in a fault's text, as in `first as users_people[0]`."""

    def placed(match: re.Match[str]) -> str:
        where = place(f"{match[0]}: ", places)
        return f"{match[0]} ({where})" if where else match[0]

    return re.sub(r"(?<=\s)[a-z]\w*\[\d+\]", placed, fault)


class ActionModule(ActionBase):  # type: ignore[misc] # Ansible ships no types
    """Checks one host's variables against the roles' argument_specs, and with the roles' own checks.

    Arguments:
        roles: Directory of the roles.

    Returns:
        `faults`, each with `text` and `place`; `waiting`: roles whose own checks could not run because of the faults;
        and `warnings`: possible mistakes, which Ansible shows once for all hosts.
    """

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Check the host of `task_vars`; Ansible calls this method."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        folder = Path(self._task.args["roles"])
        options, offered = options_of(folder), offered_by(folder)
        values: dict[str, Any] = dict(variables)
        files = [*extra_files(), *variable_files(variables)]
        places = Places(variables, files, self._loader)
        # In a collection, Ansible gives the full names of roles.
        here = sorted(options.keys() & {name.rpartition(".")[2] for name in variables["ansible_play_role_names"]})
        found = {role: self._values_faults(options[role], values, places) for role in here}
        blocked = {role for role in here if any(fault.blocks for fault in found[role])}
        wrong = [fault.text for role in here for fault in found[role]]
        judged, failures, warnings = [], {}, []
        for role in here:
            if role not in blocked and f"__{role}_faults" in variables:
                try:
                    judged += self._templar.template(variables[f"__{role}_faults"])
                    warnings += self._templar.template(variables.get(f"__{role}_warnings", []))
                except Exception as exc:  # A filter can get a value of any type and then raise any exception.
                    failures[role] = _message(exc)
        if failures and not wrong:
            # A role's checks can also fail because of faulty variables of roles that are not part of this play.
            others = [
                fault for role in options.keys() - here for fault in self._values_faults(options[role], values, places)
            ]
            wrong = [fault.text for fault in others if fault.blocks]
        if not wrong:
            judged += [f"{role}: the check of its variables failed: {said}" for role, said in failures.items()]
        every = {name: option for specification in options.values() for name, option in specification.items()}
        known = every.keys() | offered.keys()
        own = [] if "facts" in blocked else values["facts_own_variables"]
        result["waiting"] = (
            sorted(role for role in blocked | failures.keys() if f"__{role}_faults" in variables) if wrong else []
        )
        result["warnings"] = [_placed(text, place(text, places)) for text in warnings] + unused_warnings(variables)
        result["faults"] = [
            {"text": with_places(fault, places), "place": place_of_first(fault, places)}
            for fault in wrong + unknown_faults(variables, here, known, own) + judged
        ]
        # In `variables`, values that a role sets hide the user's values; hostvars has the user's. The user may set such
        # a variable if the role that sets it is not part of this play.
        given = variables["hostvars"].raw_get(variables["inventory_hostname"])
        own_values = {name: role for name, role in offered.items() if role in here}
        places = Places(given, files, self._loader)
        result["faults"] += [
            {"text": fault, "place": place_of_first(fault, places)} for fault in offered_faults(given, own_values)
        ]
        hidden = hidden_faults(variables, known, self._loader)
        result["faults"] += [{"text": text, "place": where} for where, text in hidden]
        result["faults"] += [{"text": text, "place": _shown(file)} for file, text in unread_faults(variables)]
        overridden = overridden_faults(variables, files, every, self._loader)
        result["faults"] += [{"text": text, "place": where} for where, text in overridden]
        return result

    def _values_faults(self, specification: Options, values: dict[str, Any], places: Places) -> list[Fault]:
        """Template the values of a role's variables in place; return the faults of templates and of types."""
        faults = []
        for name in sorted(specification.keys() & values.keys()):
            try:
                values[name] = self._templar.template(values[name])
            except Exception as exc:  # A template can raise any exception; its text tells the user what to fix.
                faults.append(Fault(f"{name}: {_message(exc)}", blocks=True))
            else:
                found = type_faults(name, specification[name], values[name])
                if found and name in places.extra:
                    found = type_faults(name, specification[name], values[name], AS_JSON)
                faults += found
        return faults


def options_of(folder: Path) -> dict[str, Options]:
    """Return role -> variable -> its entry in argument_specs, given the directory of the roles."""
    specifications = {path.parts[-3]: _load(path) for path in folder.glob("*/meta/argument_specs.yml")}
    return {role: specification["argument_specs"]["main"]["options"] for role, specification in specifications.items()}


def offered_by(folder: Path) -> dict[str, str]:
    """Return variables that roles set for other roles -> the role, given the directory of the roles."""
    return {name: path.parts[-3] for path in folder.glob("*/vars/main.yml") for name in _load(path)}


def file_faults(variables: Mapping[str, Any], known: Collection[str], options: Options, loader: Any) -> list[str]:
    """Return what is wrong with the variables files of a host, apart from the values: each with its place.

    Args:
        variables: The variables of the host.
        known: The variables of the roles.
        options: The variables of the roles that users set -> their entries in argument_specs.
        loader: Ansible's loader, which finds and reads the files.
    """
    overridden = overridden_faults(variables, [*extra_files(), *variable_files(variables)], options, loader)
    hidden = [_placed(text, where) for where, text in hidden_faults(variables, known, loader)]
    unread = [_placed(text, _shown(file)) for file, text in unread_faults(variables)]
    return hidden + unread + [_placed(text, where) for where, text in overridden] + unused_warnings(variables)


def extra_files() -> list[Path]:
    """Return the variables files on ansible-playbook's command line (-e @FILE), highest precedence first."""
    given = [str(text) for text in context.CLIARGS.get("extra_vars") or ()]
    return [file for text in reversed(given) if text.startswith("@") and (file := Path(text[1:])).is_file()]


def variable_files(variables: Mapping[str, Any]) -> list[Path]:
    """Return the files of the inventory and of group_vars and host_vars that can set a host's variables.

    The file with the highest precedence is first.
    """
    found = [paths[0] for paths in variable_paths(variables)]
    found += [path for path in [Path(variables.get("inventory_file") or "")] if path.suffix in (".yml", ".yaml")]
    return [
        file for path in found for file in (sorted(path.rglob("*.y*ml")) if path.is_dir() else [path]) if file.is_file()
    ]


def hidden_faults(variables: Mapping[str, Any], known: Collection[str], loader: Any) -> list[tuple[str, str]]:
    """Return the variables of roles that are set by two files in the same directory; Ansible uses the later file.

    Args:
        variables: The variables of a host.
        known: The variables of the roles.
        loader: Ansible's loader, which finds and reads the files.

    Returns:
        For each such variable, the file and line of the value that has no effect, and the fault.
    """
    faults = []
    for first, *_ in variable_paths(variables):
        before: dict[str, str] = {}
        for file in loader.find_vars_files(str(first.parent), first.name) if first.is_dir() else []:
            for key in [key for key, _ in _pairs(_composed(Path(file), loader)) if key.value in known]:
                name, here = key.value, f"{_shown(Path(file))}:{key.start_mark.line + 1}"
                if name in before:
                    text = f"{name}: this value has no effect, since {here} is read later and wins; remove one of them"
                    faults.append((before[name], text))
                before[name] = here
    return sorted(faults)


def overridden_faults(
    variables: Mapping[str, Any], files: Iterable[Path], options: Options, loader: Any
) -> list[tuple[str, str]]:
    """Return type faults of values that have no effect now, since a value of higher precedence overrides them.

    Without this check, such a fault appears only on the day when the other value is removed. Templates, and values
    that are encrypted or in encrypted files, are left out.

    Args:
        variables: The variables of a host, with their untemplated values.
        files: The files that can set the variables.
        options: The variables of the roles -> their entries in argument_specs.
        loader: Ansible's loader, which reads the files.

    Returns:
        For each fault, file and line, and the fault.
    """
    faults = []
    for file in files:
        if not {"group_vars", "host_vars"} & set(file.parts):
            continue
        # Encrypted files are not decrypted for this: that takes time, for each host.
        for key, node in _pairs(_nodes(file.read_bytes())):
            name = key.value
            if name not in options or _may_be(node, variables.get(name)):
                continue
            value = yaml.constructor.SafeConstructor().construct_object(node, deep=True)
            if "{{" not in str(value) and "{%" not in str(value):
                places = Places({name: value}, [file], loader)
                faults += [(place(text, places), text) for text, _ in type_faults(name, options[name], value)]
    return faults


def unread_faults(variables: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Return the variables files that Ansible silently ignores because of another file, each with the reason."""
    faults = []
    for first, *others in variable_paths(variables):
        taken, way = first.name, "merge them into one file"
        if first.is_dir():
            taken, way = f"{first.name}/", "move it into that directory"
        faults += [
            (path, f"this file is not read, since Ansible reads only {taken} in the same directory; {way}")
            for path in others
        ]
    return faults


def unused_warnings(variables: Mapping[str, Any]) -> list[str]:
    """Return a warning for each variables file whose group or host does not exist but resembles an existing one.

    Ansible silently ignores variables files of unknown groups and hosts. A file whose name resembles nothing is no
    mistake: its group or host may be absent at present.
    """
    groups, hosts = list(variables["groups"]), [*variables["groups"]["all"], "localhost"]
    warnings = []
    for folder in _variable_folders(variables):
        for kind, known, away in (("group", groups, OF_NODES), ("host", hosts, WORKER)):
            found = {_stem(path): path for path in sorted(folder.glob(f"{kind}_vars/*")) if _is_read(path)}
            for name, file in found.items():
                if name in known:
                    continue
                if away.fullmatch(name):
                    meant = next((f"{kind}_vars/{other}" for other in known if _is_slip(name, other)), "")
                else:
                    meant = _meant(name, kind, groups, hosts)
                if meant:
                    text = f"this file is not read, since the inventory has no {kind} {name}; did you mean {meant}?"
                    warnings.append(f"{_shown(file)}: {text}")
    return warnings


def _meant(name: str, kind: str, groups: Collection[str], hosts: Collection[str]) -> str:
    """Return the group or host that the user probably meant by a variables file's name; empty if none is similar."""
    plain = re.sub(r"\W", "_", name)
    # Two names that differ only in a number, such as node1 and node2, can both be correct.
    near = difflib.get_close_matches(name, groups, 1, ALIKE_GROUP) if kind == "group" else []
    near = [group for group in near if group.translate(NO_DIGITS) != name.translate(NO_DIGITS)]
    if found := next((group for group in (f"node_{plain}", plain, plain.lower(), *near) if group in groups), ""):
        return f"group_vars/{found}"
    dashed = name.replace("_", "-").lower()
    return f"host_vars/{dashed}" if dashed in hosts else ""


def _is_slip(name: str, other: str) -> bool:
    """Return whether two names differ in one letter that is wrong, missing, extra, or swapped with its neighbour.

    Digits, and words of one letter, number nodes and zones: pod-a and pod-b can both be correct.
    """
    start = _count_equal(name, other)
    end = _count_equal(name[start:][::-1], other[start:][::-1])
    one, two = name[start : len(name) - end], other[start : len(other) - end]
    neighbours = name[:start][-1:] + name[len(name) - end :][:1]
    is_swapped = len(one) == 2 and one == two[::-1]
    is_in_word = any(letter.isalpha() for letter in neighbours)
    return is_in_word and (one + two).isalpha() and (is_swapped or max(len(one), len(two)) == 1)


def _count_equal(one: str, two: str) -> int:
    """Return how many letters at the beginning of two texts are equal."""
    return next((index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _stem(path: Path) -> str:
    """Given a variables file or directory, return the name of its group or host."""
    return path.name.removesuffix(path.suffix) if path.suffix in SUFFIXES else path.name


def _is_read(path: Path) -> bool:
    """Return whether Ansible would read this variables file or directory if its group or host existed."""
    return not path.name.startswith(".") and (path.is_dir() or path.suffix in SUFFIXES)


def _variable_folders(variables: Mapping[str, Any]) -> list[Path]:
    """Return the directories in which Ansible looks for group_vars and host_vars: playbook and inventory."""
    return [Path(variables[name]) for name in ("playbook_dir", "inventory_dir") if variables.get(name)]


def variable_paths(variables: Mapping[str, Any]) -> list[list[Path]]:
    """Return the existing variables files and directories of a host, one list per group or host and directory.

    Ansible reads only the first of each list. The lists of the host come first, then those of its groups by precedence.
    """
    stems = [
        f"host_vars/{variables['inventory_hostname']}",
        *(f"group_vars/{name}" for name in variables["group_names"]),
        "group_vars/all",
    ]
    folders = _variable_folders(variables)
    named = [[folder / f"{stem}{suffix}" for suffix in SUFFIXES] for stem in stems for folder in folders]
    return [found for paths in named if (found := [path for path in paths if path.exists()])]


def _placed(text: str, where: str) -> str:
    return f"{where}: {text}" if where else text


def _message(exc: Exception) -> str:
    return " ".join(str(exc).split())


def _load(path: Path) -> Any:
    return yaml.load(path.read_text(), LOADER)  # noqa: S506 - it is safe
