"""Check the roles: argument_specs equal defaults/; READMEs and docs/roles.md are generated from argument_specs.

Also check the five steps of all roles (docs/architecture.md), and that tasks wait for apt's lock.

    tools/check_roles.py           fails if a role's files disagree
    tools/check_roles.py --write   writes the READMEs, docs/roles.md and the lists of the role facts

Exit codes: 0 all agree, 1 something differs.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
Spec = dict[str, Any]

#: The role that reads a worker's state for all other roles, so that it is their step "read".
FACTS = "facts"

#: The further steps, in the order of a role's tasks.
STEPS = ("check", "install", "apply", "prove")
#: Module, or imported file -> step; all other modules are step "apply". A debug task can be in any step.
MODULE_STEPS = {
    "validate.yml": "check",
    "ansible.builtin.assert": "check",
    "install.yml": "install",
    "ansible.builtin.apt": "install",
    "ansible.builtin.git": "install",
    "ansible.builtin.pip": "install",
    "ansible.builtin.fail": "prove",
    "ansible.builtin.debug": None,
}
#: The lists of the role facts, as variables without their prefix.
READS = ("files", "programs", "settings", "signing_keys", "units")
#: Private variables of the role facts, generated from the roles' files ABOUT.
KNOWN = ("brought_groups", "mentions", "packages", "paths")
#: File of a role with the entries for these lists, what the role installs, and steps that its tasks do not show.
ABOUT = "meta/tpu_ops.yml"
#: A variable that reads files, programs or the environment of the controller, or what only its inventory knows. A
#: template is a file of the role, so that workers have it as well.
OF_CONTROLLER = re.compile(
    r"""\b(?:lookup|query)\((?!'ansible\.builtin\.template')|(?:sel|rej)ect\('(?:ansible\.builtin\.)?file'"""
    r"""|is file|expanduser|\binventory_(?:dir|file)\b|(?<![.\w'"])groups(?![\w'":])"""
)
#: The files with tasks.
TASK_FILES = ("roles/*/tasks/*.yml", "roles/*/handlers/*.yml", "playbooks/**/*.yml")
#: Endings of variables whose default has a source that the description must name.
LOOKED_UP = ("_commit", "_fingerprint", "_version")


class Indented(yaml.SafeDumper):
    """Write YAML that yamllint accepts: a list in a mapping is indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists as well."""
        super().increase_indent(flow, indentless=False)


def load(path: Path) -> Any:
    """Return the content of a YAML file; None if there is no such file."""
    return yaml.safe_load(path.read_text()) if path.is_file() else None


def option_faults(name: str, option: Spec) -> list[str]:
    """Return what the specification of a variable lacks, including suboptions."""
    faults = [f"{name} has no {key}" for key in ("type", "description") if key not in option]
    if ("default" in option) == bool(option.get("required")):
        faults.append(f"{name} needs either a default or required: true")
    if name.endswith(LOOKED_UP) and option.get("default") and "The default" not in option.get("description", ""):
        faults.append(f"{name}: the description does not say where the default is from")
    if option.get("type") == "list" and "elements" not in option:
        faults.append(f"{name} is a list without elements")
    for inner, value in option.get("options", {}).items():
        faults += option_faults(f"{name}.{inner}", value)
    return faults


def role_faults(role: str, spec: Spec, defaults: Spec) -> list[str]:
    """Return the differences between a role's main entry point and its defaults."""
    options = spec.get("options", {})
    faults = [] if spec.get("short_description") else ["the entry point has no short_description"]
    for name, option in options.items():
        if not name.startswith(f"{role}_"):
            faults.append(f"{name} does not start with {role}_")
        faults += option_faults(name, option)
    if list(options) != sorted(options) or list(defaults) != sorted(defaults):
        faults.append("variables are not sorted by name")
    faults += [
        f"{name} is in argument_specs only" for name in options if "default" in options[name] and name not in defaults
    ]
    faults += [f"{name} is in defaults only" for name in defaults if name not in options]
    for name in defaults.keys() & options.keys():
        stated = options[name].get("default")
        if stated != defaults[name] or type(stated) is not type(defaults[name]):
            faults.append(f"{name} defaults to {defaults[name]!r}, and argument_specs says {stated!r}")
    return faults


def each_task(tasks: list[Spec]) -> Iterator[Spec]:
    """Yield the tasks of a file, including those in blocks."""
    for task in tasks:
        inner = [each for part in ("block", "rescue", "always") for each in task.get(part, [])]
        yield from each_task(inner) if inner else [task]


def task_step(about: Spec, task: Spec) -> str | None:
    """Return the step of a task; None if the task can be in any step."""
    imported = str(task.get("ansible.builtin.import_tasks", ""))
    found = [MODULE_STEPS[key] for key in (imported, *task) if key in MODULE_STEPS]
    default = found[0] if found else "apply"
    return str(about["steps"][task["name"]]) if task["name"] in about.get("steps", {}) else default


def step_faults(about: Spec, tasks: list[Spec]) -> list[str]:
    """Return the tasks of a role that come after a later step, and steps that are missing without a reason.

    Args:
        about: The role's file ABOUT: `steps` of tasks by name, and reasons for `omitted` steps.
        tasks: The tasks of the role.
    """
    faults, last = [], 0
    steps = [(task["name"], step) for task in each_task(tasks) if (step := task_step(about, task))]
    for name, step in steps:
        if STEPS.index(step) < last:
            faults.append(f"'{name}' belongs to the step {step}, but comes after a task of {STEPS[last]}")
        last = max(last, STEPS.index(step))
    there, stated = {step for _, step in steps}, about.get("omitted", {}).keys()
    missing = [step for step in STEPS if step not in there | stated]
    faults += [f"no task of the step {step}, and {ABOUT} gives no reason" for step in missing]
    faults += [
        f"{ABOUT} says that there is no step {step}, but there is one" for step in STEPS if step in there & stated
    ]
    unknown = about.get("steps", {}).keys() - {name for name, _ in steps}
    return faults + [f"{ABOUT} names the task '{name}', which does not exist" for name in sorted(unknown)]


def apt_faults(tasks: list[Spec]) -> list[str]:
    """Return the tasks that fail at once if another process holds apt's lock, as a first boot does for minutes."""
    faults = []
    for task in each_task(tasks):
        if {"apt", "package", "ansible.builtin.package"} & task.keys():
            faults.append(f"'{task['name']}': use ansible.builtin.apt, which can wait for the lock")
        elif "lock_timeout" not in task.get("ansible.builtin.apt", {"lock_timeout": 0}):
            faults.append(f"'{task['name']}': apt without lock_timeout")
    return faults


def check_apt(root: Path) -> list[str]:
    """Check that all tasks of roles and playbooks wait for apt's lock; return the faults with their files."""
    faults = []
    for path in sorted(each for place in TASK_FILES for each in root.glob(place)):
        content = load(path) or []
        plays = [play for play in content if "hosts" in play or "ansible.builtin.import_playbook" in play]
        parts = ("pre_tasks", "tasks", "post_tasks", "handlers")
        tasks = [task for play in plays for part in parts for task in play.get(part, [])] if plays else content
        faults += [f"{path.relative_to(root)}: {fault}" for fault in apt_faults(tasks)]
    return faults


def read_on_workers(roles: dict[str, Spec], used: str) -> Spec:
    """Return the variables of roles that a worker reads when it runs the roles on itself, with their values.

    Args:
        roles: Role -> `variables`, and its file ABOUT as `about`.
        used: The text of all tasks, handlers and templates.
    """
    variables = {name: value for role in roles.values() for name, value in role["variables"].items()}
    given = {name for role in roles.values() for name in role["about"].get("controller", {}).get("values", [])}
    # Playbooks read these by their names.
    left = {f"__{role}_{kind}" for role in roles for kind in ("faults", "warnings")} | set(re.findall(r"\w+", used))
    left |= {name for name in variables if not name.startswith("_")}
    found: Spec = {}
    while left:
        name = left.pop()
        if name in variables and name not in found and name not in given:
            found[name] = variables[name]
            left |= set(re.findall(r"\w+", str(variables[name])))
    return found


def variables_and_uses(folders: list[Path]) -> tuple[dict[str, Spec], str]:
    """Return the arguments of `read_on_workers` for the roles in some directories."""
    roles, used = {}, ""
    for folder in folders:
        files = [folder / "defaults" / "main.yml", folder / "vars" / "main.yml"]
        variables = {name: value for file in files for name, value in (load(file) or {}).items()}
        roles[folder.name] = {"variables": variables, "about": load(folder / ABOUT) or {}}
        parts = [path for part in ("tasks", "handlers", "templates") for path in sorted((folder / part).glob("*"))]
        used += "".join(path.read_text() for path in parts)
    return roles, used


def controller_faults(roles: dict[str, Spec], used: str) -> list[str]:
    """Return the faults of what roles list under `controller`. The arguments are those of `read_on_workers`."""
    faults = []
    anywhere = {name for each in roles.values() for name in each["about"].get("controller", {}).get("anywhere", {})}
    for name, value in read_on_workers(roles, used).items():
        if name not in anywhere and OF_CONTROLLER.search(str(value)):
            faults.append(f"{name}: only the controller can compute it; list it in {ABOUT}, controller: values")
    for role, each in roles.items():
        about = each["about"].get("controller", {})
        listed = (about.get(part, ()) for part in ("values", "tasks", "anywhere", "secrets"))
        for name in itertools.chain.from_iterable(listed):
            if name not in each["variables"]:
                faults.append(f"roles/{role}/{ABOUT}: controller: the role has no variable {name}")
    return faults


def code(text: str) -> str:
    """Return text as Markdown code for a table cell."""
    return f"`{text}`".replace("|", "\\|")


def prose(text: str) -> str:
    """Return a description as Markdown: Ansible's markup for options and values becomes code."""
    return re.sub(r"\b[OCV]\(([^)]*)\)", r"`\1`", " ".join(text.split()))


def shown(value: Any) -> str:
    """Return a default value as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def rows(options: Spec, prefix: str = "") -> list[str]:
    """Return the table rows of options; suboptions follow their parent."""
    lines = []
    for name, option in options.items():
        kind = f"list of {option['elements']}" if option["type"] == "list" else option["type"]
        if "choices" in option:
            kind = ", ".join(map(str, option["choices"]))
        default = "required" if option.get("required") else code(shown(option["default"]))
        description = prose(option["description"]).replace("|", "\\|")
        lines.append(f"| {code(prefix + name)} | {kind} | {default} | {description} |")
        lines += rows(option.get("options", {}), f"{prefix}{name}[].")
    return lines


def readme(role: str, spec: Spec) -> str:
    """Return the text of a role's README."""
    description = spec.get("description", [])
    paragraphs = [prose(text) for text in ([description] if isinstance(description, str) else description)]
    table = ["| variable | type | default | meaning |", "|---|---|---|---|", *rows(spec.get("options", {}))]
    note = "Generated from `meta/argument_specs.yml` by `tools/check_roles.py --write`."
    return "\n\n".join([f"# {role}", f"{spec['short_description']}.", *paragraphs, "\n".join(table), note]) + "\n"


def check(folder: Path, *, write: bool) -> list[str]:
    """Check one role, and with ``write`` write its README; return all faults with their files."""
    role = folder.name
    specs = load(folder / "meta" / "argument_specs.yml")
    if not isinstance(specs, dict) or "main" not in specs.get("argument_specs", {}):
        return [f"{folder}/meta/argument_specs.yml: no entry point main"]
    spec = specs["argument_specs"]["main"]
    depends = (load(folder / "meta" / "main.yml") or {}).get("dependencies", [])
    if role != FACTS and FACTS not in depends:
        return [f"{folder}/meta/main.yml: the role does not depend on {FACTS}"]
    if faults := role_faults(role, spec, load(folder / "defaults" / "main.yml") or {}):
        return [f"{folder}: {fault}" for fault in faults]
    tasks = load(folder / "tasks" / "main.yml") or []
    if role != FACTS and (faults := step_faults(load(folder / ABOUT) or {}, tasks)):
        return [f"{folder}/tasks/main.yml: {fault}" for fault in faults]
    path, text = folder / "README.md", readme(role, spec)
    if write:
        path.write_text(text)
    elif not path.is_file() or path.read_text() != text:
        return [f"{path}: differs from meta/argument_specs.yml; run tools/check_roles.py --write"]
    return []


def merged(reads: list[Spec]) -> Spec:
    """Return the defaults of the role facts, sorted, from the entries of all roles."""
    found: Spec = {}
    for key in READS:
        values = [each[key] for each in reads if key in each]
        if all(isinstance(each, dict) for each in values):
            found[f"{FACTS}_{key}"] = dict(sorted(item for each in values for item in each.items()))
        else:
            found[f"{FACTS}_{key}"] = sorted({item for each in values for item in each})
    return found


def known(about: dict[str, Spec]) -> Spec:
    """Return the private variables of the role facts, from each role's file ABOUT."""
    reads = [each.get("reads", {}) for each in about.values()]
    brings = {role: each["brings"] for role, each in about.items() if "brings" in each}
    mentions = {word: files for each in reads for word, files in each.get("mentions", {}).items()}
    values = (
        sorted({group for each in brings.values() for group in each.get("groups", [])}),
        dict(sorted(mentions.items())),
        {role: each["packages"] for role, each in sorted(brings.items()) if "packages" in each},
        sorted({path for each in reads for path in each.get("paths", [])}),
    )
    return {f"__{FACTS}_{name}": value for name, value in zip(KNOWN, values, strict=True)}


def with_value(text: str, key: str, indent: int, value: Any) -> str:
    """Replace the value of a key in the text of a YAML file.

    Args:
        text: The text.
        key: A regular expression from the beginning of the line to the key.
        indent: Number of spaces before the key.
        value: A non-empty list or mapping.
    """
    lines = yaml.dump(value, Dumper=Indented, width=10_000).splitlines()
    block = "".join(f"{' ' * (indent + 2)}{line}\n" for line in lines)
    before = re.compile(rf"(^{key}:).*\n(?: {{{indent + 1},}}.*\n)*", re.MULTILINE)
    return before.sub(lambda match: f"{match[1]}\n{block}", text, count=1)


def check_reads(folders: list[Path], *, write: bool) -> list[str]:
    """Check the lists of the role facts, and with ``write`` write them; return all faults."""
    about = {folder.name: load(folder / ABOUT) or {} for folder in folders}
    reads = merged([each.get("reads", {}) for each in about.values()])
    faults = []
    for name, key, indent, values in (
        ("defaults/main.yml", "{}", 0, reads),
        ("meta/argument_specs.yml", r" {{6}}{}:\n(?: {{8}}.*\n)*? {{8}}default", 8, reads),
        ("vars/main.yml", "{}", 0, known(about)),
    ):
        path = ROOT / "roles" / FACTS / name
        text = path.read_text()
        for variable, value in values.items():
            text = with_value(text, key.format(variable), indent, value)
        if write:
            path.write_text(text)
        elif path.read_text() != text:
            faults.append(f"{path}: differs from {ABOUT} of the roles; run tools/check_roles.py --write")
    return faults


def order(plays: list[Spec]) -> list[str]:
    """Return the roles in the plays of playbooks/site.yml, in order."""
    found = []
    for play in plays:
        found += play.get("roles", [])
        for task in play.get("tasks", []):
            role = task.get("ansible.builtin.import_role", {})
            if role and "tasks_from" not in role:
                found.append(role["name"])
    return found


def overview(roles: dict[str, Spec], names: list[str], scenarios: set[str]) -> str:
    """Return the text of docs/roles.md from the roles' specifications, their order and the scenarios of Molecule."""
    lines = ["| role | what it does | scenario |", "|---|---|---|"]
    for name in [*names, *sorted(roles.keys() - set(names))]:
        scenario = name if name in scenarios else "site"
        does = prose(roles[name]["short_description"]).replace("|", "\\|")
        lines.append(f"| [{name}](../roles/{name}/README.md) | {does} | [{scenario}](../molecule/{scenario}/) |")
    return f"""# Roles

`ansible-playbook site.yml` checks the variables of the whole fleet, and then runs these roles on every worker, in this
order. `--tags NAME` runs only one of them (and facts before it, which has no tag of its own). Each README lists the
role's variables; set them in `inventory/group_vars/`.

{chr(10).join(lines)}

`tools/molecule.sh test -s NAME` runs a scenario on the lab's workers. `make molecule` runs all of them, on Debian 12
and 13, and on Ubuntu 22.04 and 24.04 if an image registry answers. In each scenario, check mode has to report what
converge then changes, and a second run must change nothing. The scenario of a role
also breaks workers by hand, and the role has to repair them.
[unproved.md](unproved.md) lists what no test here executes. [own-packages.md](own-packages.md) says which `python` and
`pip` people get on a worker.

## When variables are at fault

`site.yml`, `users.yml`, `disks.yml`, `python.yml` and `workspace.yml` check the variables of all workers before the
first change, whatever `--tags` says. If there are errors, they end with one list of all of them, by file and line:

    inventory/group_vars/all/main.yml:14: users_people[1]: ada: listed twice, first as users_people[0] ...
    inventory/group_vars/all/main.yml:30: disks_mount: no role has this variable; did you mean disks_mounts? ...
    inventory/host_vars/pod-w3.yml:2: base_hugepages: 'sometimes' is not one of auto, always, madvise, never, ...

- A value must have the type given in the README: `"yes"` is not a boolean and `3.10` is not a string. `-e name=value`
  always gives a string; `-e '{{"name": false}}'` does not. Values in group_vars and host_vars are checked even if other
  values override them.
- An unknown variable counts as misspelt if its name begins with a role's name, or is almost that of a role's variable.
  `facts_own_variables` lists those that are your own.
- Some variables are set by a role of the playbook for others to read, such as `python_uv`. It is an error to set one:
  your value would have no effect.
- It is an error if Ansible ignores a variables file because a directory or file with the same name takes precedence
  (`group_vars/all/` over `group_vars/all.yml`).
- A role's variable that is set in two files of one directory is an error, since Ansible uses only the last.
- A file in `group_vars/` or `host_vars/` with almost the name of a group or host is a warning, such as `pod.yml` for
  the group `node_pod`. Ansible itself silently ignores a file for an unknown group or host.
- A line without a file is about a role's default, or about a value that is set neither in a variables file nor in an
  inventory, such as in a playbook. For a value that a template produces, the line is that of the template.
- Some roles can check their variables only when the types are right. The end of the list names these roles, and the
  next run checks them.
- A worker may lack a login shell or the `tcmalloc_library`. This is a warning if a package that the playbook will
  install may provide it, and an error otherwise. A missing library outside the system's own directories (in /usr/local
  or /opt) is only a warning, since a mounted disk may contain it.
- A file that is not valid YAML ends Ansible before all checks, without the file's name. `tpu_ops configure` names the
  file and the place of the error.
- A worker that does not answer is not checked; Ansible has already dropped it. Workers that `--limit` leaves out are
  not checked either, except for settings that must agree between workers, such as the server of an export.

A role in your own playbook also checks its variables first, on each worker. It counts packages of `base` and `shell` as
coming only if the playbook lists these roles under `roles:` or uses `import_role`. Roles of `include_role` are not
known beforehand, so a login shell that they would install is refused.

## While runs are active

`site.yml` can be run at any time. An environment that a run may be using is not changed. Where one would change, the
worker fails before its first package moves, with the name of the run; check mode warns. A run that is started during
the change is refused: the message names the person who makes the change, and its start. `python_fill_during_runs: true`
changes environments under active runs as well, and prevents no run from starting.

New environments are created, and everything else is configured, even while a run is active. The role workspace moves
its projects too, and installs the packages they need into their environment, unless `workspace_during_runs` is false.
No run can start during that time. `playbooks/upgrade.yml` does not start while a run is active.

## Two playbooks at once

Two people may configure the same workers at the same time. On each worker, a lock lets only one playbook at a time
change environments, disks, NFS, projects or files of the system. Packages wait for apt's lock. A playbook that begins
while another one is at work on a worker prints a warning with the account of the other person, the address of that
login, and the start time.

The playbook waits up to 300 s for each of these locks. It then fails on that worker and names the holder of the lock.
No step is left half done, so the playbook can be run again. If their settings differ, the last playbook wins.

A lock ends with the process on the worker that holds it. If a playbook is killed, the current step continues to its
end. No lock is left that could block the next playbook.

Generated from the roles' `meta/argument_specs.yml` by `tools/check_roles.py --write`.
"""


def check_overview(folders: list[Path], *, write: bool) -> list[str]:
    """Check docs/roles.md against the roles, and with ``write`` write it; return all faults."""
    roles = {folder.name: load(folder / "meta" / "argument_specs.yml")["argument_specs"]["main"] for folder in folders}
    names = order(load(ROOT / "playbooks" / "site.yml"))
    if missing := sorted(set(names) - roles.keys()):
        return [f"playbooks/site.yml: no role is called {', '.join(missing)}"]
    scenarios = {path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")}
    path, text = ROOT / "docs" / "roles.md", overview(roles, names, scenarios)
    if write:
        path.write_text(text)
    elif not path.is_file() or path.read_text() != text:
        return ["docs/roles.md: differs from the roles; run tools/check_roles.py --write"]
    return []


def main() -> int:
    """Check all roles."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the READMEs and docs/roles.md")
    write = parser.parse_args().write
    folders = [folder for folder in sorted((ROOT / "roles").iterdir()) if (folder / "tasks").is_dir()]
    faults = check_reads(folders, write=write) + [fault for folder in folders for fault in check(folder, write=write)]
    faults = faults or check_overview(folders, write=write) + check_apt(ROOT) + controller_faults(
        *variables_and_uses(folders)
    )
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
