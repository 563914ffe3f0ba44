"""Filters that check the variables of the role python and plan its work; no side effects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from tpu_ops.protocol.installed_packages import normalised, pinned_packages

Words = dict[str, Any]

#: The commands in /usr/local/bin. python3 is not among them, since programs of the system start it.
_ON_PATH = ("python", "pip", "pip3", "uv")
#: The first lines of the commands of `command_files`. Only files that begin so are removed.
COMMAND = "#!/bin/sh\n# Written by Ansible; changes are lost.\n"

#: The newest uv whose list of Python builds was read (`uv python list --all-versions --only-downloads`), and the first
#: and last minor version of Python 3 in this list, read on 2026-11-22. A newer uv may have newer Pythons.
UV_KNOWN, UV_PYTHONS = "0.13.9", (8, 16)
#: The same range for the deadsnakes archive, whose list was not read: wide bounds that only catch typing errors, those
#: of uv and one older version. On a worker with the archive, `apt-cache search '^python3[.][0-9]+$'` shows what it has
#: for that release of Ubuntu.
DEADSNAKES_PYTHONS = (7, 16)

#: Advice for a lock file that does not contain what the requirements ask for.
ANEW = "recreate it with `uv pip compile`"

#: Packages whose versions the report shows, in addition to the digest of all packages.
SHOWN = ("jax", "jaxlib", "libtpu", "torch", "torch-xla", "numpy", "flax")


def python_programs(source: str, version: str, more: list[Words], system: str) -> dict[str, Words]:
    """Return the fleet's Pythons: version -> source, and the path or version by which uv finds it.

    Args:
        source: python_source.
        version: python_version.
        more: python_more_versions.
        system: Version of the distribution's Python as major.minor.
    """
    first = {"version": system if source == "distribution" else version, "source": source}
    found: dict[str, Words] = {}
    for entry in (first, *more, {"version": system, "source": "distribution"}):
        number, origin = str(entry["version"]), entry.get("source", "uv")
        program = {"distribution": "/usr/bin/python3", "deadsnakes": f"/usr/bin/python{number}", "uv": number}[origin]
        found.setdefault(number, {"source": origin, "program": program})
    return found


def python_faults(more: list[Words], source: str, version: str, uv_version: str, own_places: list[str]) -> list[str]:
    """Return the faults of the requested versions of Python, as far as the sources' versions are known.

    Args:
        more: python_more_versions.
        source: python_source.
        version: python_version.
        uv_version: python_uv_version.
        own_places: The sources for which a mirror is set; a mirror may have other versions, so these are not checked.
    """
    asked = [(f"python_more_versions[{position}].version", entry) for position, entry in enumerate(more)]
    if source != "distribution":
        asked.insert(0, ("python_version", {"version": version, "source": source}))
    try:
        uv = Version(uv_version)
    except InvalidVersion:
        return [f"python_uv_version: '{uv_version}' is not a version such as {UV_KNOWN}"]
    faults = []
    for where, entry in asked:
        number, origin = str(entry["version"]), entry.get("source", "uv")
        if not re.fullmatch(r"3\.[0-9]+", number):
            faults.append(f"{where}: '{number}' is not a version such as 3.12")
            continue
        first, last = UV_PYTHONS if origin == "uv" else DEADSNAKES_PYTHONS
        newer_uv = origin == "uv" and uv > Version(UV_KNOWN)
        minor = int(number.partition(".")[2])
        if origin not in own_places and (minor < first or (minor > last and not newer_uv)):
            way = "; a newer python_uv_version may have it" if origin == "uv" and minor > last else ""
            faults.append(f"{where}: {origin} has no Python {number}, only 3.{first} to 3.{last}{way}")
    versions = Counter(str(entry["version"]) for entry in more)
    twice = [number for number, times in versions.items() if times > 1]
    return faults + [
        f"python_more_versions: {number} is listed twice; remove one of the two entries" for number in twice
    ]


def environment_path(environment: Words) -> str:
    """Return the path of an entry of python_environments."""
    return str(environment.get("path") or f"/opt/venvs/{environment['name']}")


def lock_paths(environments: list[Words], directory: str) -> list[str]:
    """Return the paths of environments' lock files on the controller; relative paths start at a directory."""
    named = [str(environment["lock"]) for environment in environments if environment.get("lock")]
    return [name if name.startswith("/") else f"{directory}/{name}" for name in dict.fromkeys(named)]


def wanted_environments(
    environments: list[Words], programs: dict[str, Words], version: str, locks: list[str]
) -> list[Words]:
    """Return environments in the form of the module uv_environments.

    Args:
        environments: Entries in the form of python_environments.
        programs: The result of `python_programs`.
        version: The version of Python for environments that name none.
        locks: The texts of the lock files, in the order of `lock_paths`.
    """
    texts = _lock_texts(environments, locks)
    return [
        {
            "name": str(entry["name"]),
            "variable": entry.get("variable") or f"python_environments[{position}]",
            "path": environment_path(entry),
            "owner": entry.get("owner") or "root",
            "python": programs[str(entry.get("python") or version)]["program"],
            "python_version": str(entry.get("python") or version),
            "requirements": list(entry.get("requirements") or []),
            "constraints": list(entry.get("constraints") or []),
            "find_links": list(entry.get("find_links") or []),
            "lock": texts.get(str(entry.get("lock")), ""),
            "exact": bool(entry.get("exact")),
            "forbidden": entry.get("forbidden") or "",
            "proof": entry.get("proof") or "",
        }
        for position, entry in enumerate(environments)
    ]


def kept_versions(wanted: list[Words], kept: Mapping[str, Mapping[str, str]]) -> list[Words]:
    """Return environments with these versions as constraints, where they have no lock.

    Args:
        wanted: The environments, in the form of the module uv_environments.
        kept: Path of an environment -> package -> version.
    """
    found = []
    for entry in wanted:
        pins = [f"{name}=={version}" for name, version in kept.get(entry["path"], {}).items()]
        found.append(entry if entry["lock"] else entry | {"constraints": entry["constraints"] + pins})
    return found


def environment_faults(
    environments: list[Words],
    programs: dict[str, Words],
    version: str,
    accounts: list[str],
    names: Words | None = None,
) -> list[str]:
    """Return every fault of environments.

    Args:
        environments: Entries in the form of python_environments.
        programs: The result of `python_programs`.
        version: The version of Python for environments that name none.
        accounts: The accounts that the worker has once site.yml has run.
        names: Key -> the variable with its value, for messages; None if the keys are those of python_environments.
    """
    faults = []
    for key, values in (
        ("name", [str(entry["name"]) for entry in environments]),
        ("path", [environment_path(entry) for entry in environments]),
    ):
        twice = [value for value, times in Counter(values).items() if times > 1]
        faults += [f"python_environments: two entries have the {key} {value}; change one of the two" for value in twice]
    for position, entry in enumerate(environments):
        name, path = str(entry["name"]), environment_path(entry)
        found = [
            (key, fault)
            for key in ("requirements", "constraints")
            for fault in requirement_faults(entry.get(key) or [])
        ]
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            found.append(("name", "the name contains characters other than letters, digits, '.', '_' and '-'"))
        if not re.fullmatch(r"(/[A-Za-z0-9._@+-]+){2,}", path) or "/../" in f"{path}/":
            fault = (
                f"{path} is not an absolute path with two or more parts of letters, digits and . _ @ + -; give a path"
                " such as"
            )
            fault += " /opt/venvs/a"
            found.append(("path", fault))
        if (python := str(entry.get("python") or version)) not in programs:
            known = ", ".join(programs)
            found.append(
                (
                    "python",
                    f"{python} is not one of this worker's Pythons ({known}); add it to python_more_versions",
                )
            )
        if not {owner := str(entry.get("owner") or "root"), "*"} & set(accounts):
            fault = f"{owner} has no account and is not in users_people for this node; set owner, or list {owner} for"
            found.append(("owner", f"{fault} this node"))
        faults += [f"{_where(position, key, names)}: {name}: {fault}" for key, fault in found]
    return faults


def shared_path_faults(environments: list[Words], venv: str) -> list[str]:
    """Return the faults of entries of python_environments with the path jax_venv: two roles would change it."""
    return [
        f"python_environments[{position}].path: {entry['name']}: {venv} is also jax_venv; choose another path"
        for position, entry in enumerate(environments)
        if environment_path(entry) == venv
    ]


def _where(position: int, key: str, names: Words | None) -> str:
    """Return the beginning of a fault: the variable, or the entry and key of python_environments."""
    return str(names[key]) if names and key in names else f"python_environments[{position}].{key}"


def requirement_faults(requirements: list[str]) -> list[str]:
    """Return the faults of requirements that cannot be parsed. Options and paths are not checked here but by uv."""
    faults = []
    for text in requirements:
        if not re.match(r"[A-Za-z0-9]", text) or "/" in text.partition("@")[0]:
            continue
        try:
            Requirement(re.split(r" #|\s--hash\b", text, maxsplit=1)[0])
        except InvalidRequirement as exc:
            faults.append(f"requirement '{text}': {str(exc).splitlines()[0]}")
    return faults


def lock_faults(lock: str, requirements: list[str]) -> list[str]:
    """Given the text of a lock file and requirements, return a fault for each requirement that it does not meet."""
    pins = pinned_packages(lock)
    faults = [] if pins else [f"the lock file pins no package as name==version; {ANEW}"]
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        version = pins.get(normalised(requirement.name))
        if not pins or requirement.url or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if version is None:
            faults.append(f"the lock file lacks {requirement.name}; {ANEW}")
        elif not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            faults.append(f"the lock file has {requirement.name} {version}, not {wanted}; {ANEW}")
    return faults


def missing_lock_faults(
    environments: list[Words], directory: str, missing: list[str], names: Words | None = None
) -> list[str]:
    """Return a fault for each lock file that is missing on the controller.

    Args:
        environments: Entries in the form of python_environments.
        directory: The directory at which relative paths start.
        missing: The missing ones of the paths that `lock_paths` returned.
        names: As in `environment_faults`.
    """
    return [
        f"{_where(position, 'lock', names)}: {entry['name']}: {path} is missing on this machine; create it, or name"
        " another"
        for position, entry in enumerate(environments)
        for path in lock_paths([entry], directory)
        if path in missing
    ]


def environment_lock_faults(environments: list[Words], locks: list[str], names: Words | None = None) -> list[str]:
    """Return every fault of the environments' lock files.

    Args:
        environments: Entries in the form of python_environments.
        locks: The texts of the lock files, in the order of `lock_paths`.
        names: As in `environment_faults`.
    """
    texts = _lock_texts(environments, locks)
    return [
        f"{_where(position, 'lock', names)}: {entry['lock']} of {entry['name']}: {fault}"
        for position, entry in enumerate(environments)
        if entry.get("lock")
        for fault in lock_faults(texts[str(entry["lock"])], list(entry.get("requirements") or []))
    ]


def _lock_texts(environments: list[Words], locks: list[str]) -> dict[str, str]:
    names = dict.fromkeys(str(entry["lock"]) for entry in environments if entry.get("lock"))
    return dict(zip(names, locks, strict=True))


def _own(state: Words) -> dict[str, str]:
    """Given the state of an environment, return its packages from the package index, without people's own projects."""
    others = {*state["editable"], *state["local"]}
    return {name: version for name, version in state["packages"].items() if name not in others}


def _seen(hosts: Iterable[str], hostvars: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, dict[str, Words]]:
    """Return the latest known states of environments: host -> environment -> state.

    Args:
        hosts: The hosts.
        hostvars: Their variables.
        names: Registered results of the module uv_environments, the latest last.
    """
    found: dict[str, dict[str, Words]] = {}
    for host in hosts:
        for name in names:
            found.setdefault(host, {}).update(hostvars[host].get(name, {}).get("environments", {}))
    return found


def _common_projects(seen: dict[str, dict[str, Words]]) -> dict[tuple[str, str], str]:
    """Return, for each name and key of environments, the most frequent digest of their projects' requirements."""
    words: dict[tuple[str, str], Counter[str]] = {}
    for environments in seen.values():
        for name, state in environments.items():
            if not state["fresh"]:
                words.setdefault((name, state["key"]), Counter())[state["projects"]] += 1
    return {place: counts.most_common(1)[0][0] for place, counts in words.items()}


def unrecorded_environments(wanted: list[Words], seen: Mapping[str, Words]) -> list[Words]:
    """Return the wanted environments in which the listed requirements are not recorded yet."""
    return [entry for entry in wanted if not seen.get(entry["name"], {}).get("recorded")]


def moving_projects(projects: Any, directory: str) -> list[str]:
    """Given workspace_projects and workspace_directory, return the paths of clones; invalid entries are ignored."""
    entries = [entry for entry in projects if isinstance(entry, dict)] if isinstance(projects, list) else []
    return [str(entry.get("path") or f"{directory.rstrip('/')}/{entry.get('name')}") for entry in entries]


def environment_plan(hosts: list[str], hostvars: Mapping[str, Any]) -> dict[str, Words]:
    """Plan the work on environments: return the names to `resolve` and `fill`, and `from` whose lock, for each worker.

    If environments of several workers should be equal and have no lock file, one worker resolves the set of packages
    for all of them: if possible, a worker with the most frequent of the sufficient sets. If all workers have the same
    sufficient set, nothing is done. Environments whose projects have different requirements need not be equal. A new
    environment is made equal to most others.
    """
    plan: dict[str, Words] = {host: {"resolve": [], "fill": [], "from": {}} for host in hosts}
    alike: dict[tuple[str, str, str], dict[str, Words]] = {}
    seen = _seen(hosts, hostvars, ("__python_seen",))
    common = _common_projects(seen)
    for host, environments in seen.items():
        for name, state in environments.items():
            if not state["locked"]:
                projects = common.get((name, state["key"]), "") if state["fresh"] else state["projects"]
                alike.setdefault((name, state["key"], projects), {})[host] = state
            elif state["fresh"] or state["plan"]:
                plan[host]["fill"].append(name)
    for (name, _, _), states in alike.items():
        done = {host: state for host, state in states.items() if not state["fresh"] and not state["plan"]}
        sets = {host: tuple(sorted(_own(state).items())) for host, state in done.items()}
        counts = Counter(sets.values())
        if len(done) == len(states) and len(counts) == 1:
            continue
        begun = [host for host, state in states.items() if not state["fresh"]]
        leader = max(sets, key=lambda host: counts[sets[host]]) if sets else (begun or list(states))[0]
        plan[leader]["resolve"].append(name)
        for host in states:
            plan[host]["fill"].append(name)
            plan[host]["from"][name] = leader
    return plan


def agreed_environments(wanted: list[Words], plan: Words, hostvars: Mapping[str, Any], check: bool) -> list[Words]:
    """Return the wanted environments that this worker has to fill, each with its lock file or the resolved lock.

    Raises:
        AnsibleFilterError: A worker did not resolve an environment as planned.
    """
    found = []
    for entry in wanted:
        name = entry["name"]
        if name not in plan["fill"]:
            continue
        leader = plan["from"].get(name)
        lock = entry["lock"] or (
            hostvars.get(leader, {}).get("__python_resolved", {}).get("locks", {}).get(name, "") if leader else ""
        )
        if not lock and not check and (entry["requirements"] or entry["lock"]):
            raise AnsibleFilterError(
                f"{leader} did not resolve the environment {name} for all workers; fix the error on that worker first"
            )
        found.append(entry | {"lock": lock, "agreed": entry.get("agreed") or not entry["lock"]})
    return found


def environment_report(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """Return a line for each environment and digest of its packages: the workers with it, and some of the packages."""
    groups: dict[tuple[str, str], list[str]] = {}
    states: dict[tuple[str, str], Words] = {}
    for host, environments in _seen(hosts, hostvars, ("__python_seen", "__python_filled")).items():
        for name, state in environments.items():
            group = (name, state["digest"])
            groups.setdefault(group, []).append(host)
            states[group] = state
    several = Counter(name for name, _ in groups)
    lines = []
    for (name, digest), members in sorted(groups.items()):
        packages = states[name, digest]["packages"]
        shown = [f"{package} {packages[package]}" for package in SHOWN if package in packages]
        where = ", ".join(members) if several[name] > 1 else f"{len(members)} worker{'s' if len(members) > 1 else ''}"
        what = f"{digest} on {where}: {', '.join([*shown, f'{len(packages)} packages'])}"
        lines.append(f"{name} {what}" if digest else f"{name} does not exist yet on {where}")
    return lines


def active_cases(everybody: str, people: dict[str, str], environments: list[Words]) -> str:
    """Return shell code that sets __venv to the path of a person's active environment; empty if none is active.

    Args:
        everybody: Name or path of the environment for everybody except root; empty for none.
        people: Person -> name or path of that person's environment; empty for none.
        environments: python_environments.
    """
    paths = {str(entry["name"]): environment_path(entry) for entry in environments}
    cases = [f"  {person}) __venv={paths.get(value, value)} ;;" for person, value in sorted(people.items())]
    if everybody:
        cases += ["  root) __venv= ;;", f"  *) __venv={paths.get(everybody, everybody)} ;;"]
    return "\n".join(['__venv=; case "$(id -un)" in', *cases, "esac"]) if cases else ""


def command_files(script: str, directory: str) -> list[Words]:
    """Return the entries of managed_files for the commands that choose a person's environment.

    Args:
        script: The shell script behind all of these commands; empty to remove them.
        directory: The commands' directory. Some of them are in /usr/local/bin as well.
    """
    linked = [f"{directory}/{name}" for name in ("python3", "pip", "pip3", "uv", "uvx")]
    files = {f"{directory}/python": script}
    files |= {f"/usr/local/bin/{name}": f'{COMMAND}exec {directory}/{name} "$@"\n' for name in _ON_PATH}
    if not script:
        absent: list[Words] = [{"path": path, "state": "absent"} for path in linked]
        return absent + [{"path": path, "state": "absent", "begins": COMMAND} for path in files]
    contents: list[Words] = [{"path": path, "content": content, "mode": "0755"} for path, content in files.items()]
    return contents + [{"path": path, "state": "link", "target": "python"} for path in linked]


def login_faults(everybody: str, people: dict[str, str], environments: list[Words]) -> list[str]:
    """Return the faults of python_active_environment and python_active_environments."""
    names = {str(entry["name"]) for entry in environments}
    faults = [
        f"python_active_environment{f's.{person}' if person else ''}: '{value}' is neither one of"
        " python_environments nor an absolute path"
        for person, value in [("", everybody), *people.items()]
        if value and value not in names and not re.fullmatch(r"(/[A-Za-z0-9._@+-]+)+", value)
    ]
    return faults + [
        f"python_active_environments: '{person}' is not an account name; use lowercase letters, digits, - and _, not"
        " starting with a digit or -"
        for person in people
        if not re.fullmatch(r"[a-z_][a-z0-9_-]*", person)
    ]


class FilterModule:
    """Filters of the role python."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        functions = (
            python_programs,
            python_faults,
            lock_paths,
            wanted_environments,
            kept_versions,
            environment_faults,
            environment_lock_faults,
            missing_lock_faults,
            shared_path_faults,
            environment_plan,
            unrecorded_environments,
            moving_projects,
            agreed_environments,
            environment_report,
            active_cases,
            command_files,
            login_faults,
        )
        return {function.__name__: function for function in functions}
