"""Filters that check workspace_projects and plan the role's work; no side effects, so that their tests are tables."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

Project = dict[str, Any]

#: Remotes for which git runs no helper program that the URL names (git-clone(1), GIT URLS). `remote_faults` of the role
#: facts accepts more remotes, such as http and ftp: it checks remotes whose commit is pinned, but a project can follow
#: a branch. Scheme and user are separate groups, so that a password can be found.
URL = re.compile(
    r"(?P<scheme>https|ssh|git)://((?P<user>[^@/\s]+)@)?[^@/\s]+/\S*"
    r"|file:///\S+"
    r"|/\S+"
    r"|(?!(https?|ssh|git|ftps?|file):/)([A-Za-z0-9_][A-Za-z0-9_.-]*@)?([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])"
    r":(?!//|:)\S+"
)
#: Texts that git-check-ref-format(1) rejects in names of branches and tags.
BAD_REF = re.compile(r"^[-/]|[\s~^:?*\[\\\0]|\.\.|@\{|/$|\.lock$|//")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
EDITABLE = re.compile(r"(?P<path>[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*)(\[[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*\])?")
MODE = re.compile(r"0?[0-7]{3}")
#: Directory of a person's dotfiles in the home, and the programs that install them: the first one that exists. GitHub
#: Codespaces uses the same names.
DOTFILES = ".dotfiles"
#: Keys of dotfiles in an entry of users_people.
DOTFILES_KEYS = ("repository", "ref")
SCRIPTS = (
    "install.sh",
    "install",
    "bootstrap.sh",
    "bootstrap",
    "script/bootstrap",
    "setup.sh",
    "setup",
    "script/setup",
)
#: The same pattern as in `path_faults` of the role facts: filters cannot import another role's filters.
PATH = re.compile(r"(?!.*/\.\.(/|$))/\S+")
ABSOLUTE = "give a path that starts with /, without spaces or .."


def project_path(project: Project, directory: str) -> str:
    """Return the path of a project's clone."""
    return str(project.get("path") or f"{directory.rstrip('/')}/{project.get('name')}")


def url_fault(url: str) -> str:
    """Return the fault of a project's remote, or the empty string; the fault does not contain the remote's password."""
    match = URL.fullmatch(url)
    if match is None:
        return "is not of the form https://host/path, ssh://user@host/path, user@host:path or /path"
    if match["user"] and (":" in match["user"] or match["scheme"] == "https"):
        return (
            "contains a password or token, which git would store in plain text; remove it and use the role"
            " credentials with kind git instead"
        )
    return ""


def value_faults(project: Project, path: str) -> list[str]:
    """Return the faults of a project's values that do not depend on other projects."""
    faults = []
    if not NAME.fullmatch(str(project.get("name", ""))):
        faults.append("the name must consist of letters, digits, ., _ and -")
    if fault := url_fault(str(project.get("url", ""))):
        faults.append(f"url {fault}")
    ref = str(project.get("ref") or "HEAD")
    if BAD_REF.search(ref):
        faults.append(f"ref '{ref}' is not the name of a branch, a tag or a commit")
    if not path.startswith("/") or posixpath.normpath(path) != path or path.count("/") < 2:
        faults.append(f"path '{path}' must be absolute, with two or more parts, and without .. or a trailing slash")
    mode = project.get("mode", "0755")
    if not isinstance(mode, str) or not MODE.fullmatch(mode) or mode[-3] != "7":
        faults.append(f"mode {mode!r} is not an octal string such as '0755' that gives the owner access")
    elif project.get("owner", "root") == "root" and int(mode, 8) & 0o022:
        # git runs programs that the clone's configuration names, and in this clone root runs git: who can write there
        # is root.
        faults.append(
            f"mode {mode!r} lets others write to a clone that belongs to root, and so run programs as root; set owner"
        )
    for part in project.get("editable") or []:
        match = EDITABLE.fullmatch(str(part))
        if match is None or ".." in match["path"].split("/"):
            faults.append(f"editable '{part}' is not a path below the clone, optionally with [extras]")
    return faults


def workspace_faults(projects: list[Project], directory: str, known: dict[str, list[str]]) -> list[str]:
    """Return every fault of workspace_projects, each with project and key.

    Args:
        projects: workspace_projects.
        directory: workspace_directory.
        known: `accounts` and `groups` that the worker has once site.yml has run.
    """
    faults = []
    paths = [project_path(project, directory) for project in projects]
    names = [project.get("name") for project in projects]
    for position, project in enumerate(projects):
        where, path = f"workspace_projects[{position}]: {names[position]}", paths[position]
        found = value_faults(project, path)
        if names[position] in names[:position]:
            found.append("the name is listed twice; remove one of the two entries, or give it another name")
        for other, earlier in zip(paths[:position], names, strict=False):
            if other == path or other.startswith(f"{path}/") or path.startswith(f"{other}/"):
                found.append(
                    f"path {path} is the path of {earlier}, is inside that path or contains it; choose a path next to"
                    " that one"
                )
        if project.get("state", "present") == "present":
            owner, group = project.get("owner") or "root", project.get("group")
            if not {owner, "*"} & set(known["accounts"]):
                found.append(
                    f"owner {owner} has no account and is not in users_people for this node; set owner, or list {owner}"
                    " for this node"
                )
            if group and not {group, "*"} & set(known["groups"]):
                found.append(
                    f"there is no group {group}, and users_people does not add it on this node; set group, or list"
                    f" {group} for this node"
                )
        faults += [f"{where}: {fault}" for fault in found]
    return faults


def dotfiles_faults(people: list[dict[str, Any]]) -> list[str]:
    """Return every fault of the dotfiles of people, given the listed people who have an account on the worker."""
    faults = []
    for person in people:
        dotfiles = person.get("dotfiles")
        # argument_specs.yml refuses other types.
        if dotfiles and isinstance(dotfiles, dict):
            where = f"users_people: {person.get('name')}: dotfiles"
            unknown = [str(key) for key in dotfiles if key not in DOTFILES_KEYS]
            faults += [f"{where}: unknown key {key}; the keys are {' and '.join(DOTFILES_KEYS)}" for key in unknown]
            if fault := url_fault(str(dotfiles.get("repository", ""))):
                faults.append(f"{where}: repository {fault}")
            if BAD_REF.search(ref := str(dotfiles.get("ref") or "HEAD")):
                faults.append(f"{where}: ref '{ref}' is not the name of a branch, a tag or a commit")
    return faults


def dotfiles_projects(people: list[dict[str, Any]], accounts: Mapping[str, Mapping[str, Any]]) -> list[Project]:
    """Return the dotfiles of people as projects, in the form of workspace_projects.

    Args:
        people: The listed people who have an account on the worker.
        accounts: The worker's accounts before this run.
    """
    return [
        {
            "name": f"dotfiles of {person['name']}",
            "url": person["dotfiles"]["repository"],
            "ref": person["dotfiles"].get("ref") or "HEAD",
            "path": f"{accounts.get(person['name'], {}).get('home') or '/home/' + person['name']}/{DOTFILES}",
            "owner": person["name"],
            "mode": "0700",
            "scripts": list(SCRIPTS),
            "optional": True,
        }
        for person in people
        if person.get("dotfiles")
    ]


def environment_paths(environments: Any) -> dict[str, str]:
    """Given python_environments, return name -> path of each environment; invalid entries are ignored.

    The role python reports invalid entries, but it is not part of every play.
    """
    entries = [entry for entry in environments if isinstance(entry, dict)] if isinstance(environments, list) else []
    return {str(entry.get("name")): str(entry.get("path") or f"/opt/venvs/{entry.get('name')}") for entry in entries}


def workspace_environment_faults(projects: list[Project], environment: str, environments: Any) -> list[str]:
    """Return the faults of workspace_environment and of the projects' key environment.

    Args:
        projects: workspace_projects.
        environment: workspace_environment, for projects without their own environment.
        environments: python_environments.
    """
    words = [("workspace_environment: ", environment)]
    words += [
        (f"workspace_projects[{position}]: {project.get('name')}: environment ", str(project.get("environment") or ""))
        for position, project in enumerate(projects)
    ]
    paths = environment_paths(environments)
    faults = [
        f"{place}'{word}' is not one of python_environments and not an absolute path; name one, or {ABSOLUTE}"
        if word not in paths
        else f"{place}'{word}' is at '{paths[word]}' according to python_environments, which is not an absolute path;"
        f" {ABSOLUTE}"
        for place, word in words
        if word and not PATH.fullmatch(paths.get(word, word))
    ]
    return faults + [
        f"workspace_projects[{position}]: {project.get('name')}: environment is missing, and workspace_environment is"
        " empty; set one of them"
        for position, project in enumerate(projects)
        if project.get("editable") and project.get("state", "present") == "present"
        if not (project.get("environment") or environment)
    ]


def workspace_environment_warnings(
    projects: list[Project], environment: str, jax_venv: str, environments: Any
) -> list[str]:
    """Return a warning for each project's environment that no role creates.

    This is no fault, since somebody may have created the environment; but its path may be misspelt.

    Args:
        projects: workspace_projects.
        environment: workspace_environment, for projects without their own environment.
        jax_venv: The path of the environment that the role jax creates.
        environments: python_environments, which the role python creates.
    """
    paths = environment_paths(environments)
    return [
        f"workspace_projects[{position}]: {project.get('name')}: environment {word} is not created by any role: it is"
        " neither jax_venv nor in python_environments"
        for position, project in enumerate(projects)
        if project.get("editable") and project.get("state", "present") == "present"
        if (word := str(project.get("environment") or environment)) not in (jax_venv, *paths, *paths.values())
        if PATH.fullmatch(word)
    ]


def workspace_only_faults(projects: list[Project], only: str) -> list[str]:
    """Given workspace_projects and workspace_only, return the fault of workspace_only as a list."""
    if not only:
        return []
    name, ref = named(only)
    present = [str(project.get("name")) for project in projects if project.get("state", "present") == "present"]
    none = "no project: list the project there (inventory/group_vars, see roles/workspace/README.md)"
    there = f"workspace_projects has {', '.join(present) or none}"
    if not ref or BAD_REF.search(ref):
        return [f"workspace_only: ref '{ref}' is not the name of a branch, a tag or a commit"]
    if name is None:
        what = f"'{only}' names no project; write PROJECT@{only}"
        return [] if len(present) == 1 else [f"workspace_only: {what}; {there}"]
    return [] if name in present else [f"workspace_only: no project is called '{name}'; {there}"]


def named(only: str) -> tuple[str | None, str]:
    """Split workspace_only, [PROJECT@]REF, into project and ref; the project is None if it is missing."""
    name, sign, ref = str(only).partition("@")
    return (name, ref) if sign else (None, name)


def workspace_chosen(projects: list[Project], only: str) -> list[Project]:
    """Given projects and workspace_only, return those to check out, with their refs; dotfiles only without it."""
    if not only:
        return projects
    name, ref = named(only)
    return [
        project | {"ref": ref}
        for project in projects
        if project.get("state", "present") == "present" and name in (None, project["name"])
        if not project.get("optional")
    ]


def workspace_everywhere(
    workers: list[str], hostvars: Mapping[str, Mapping[str, Any]], own: Mapping[str, list[Project]]
) -> dict[str, list[Project]]:
    """Return the projects of each worker in a play, and the dotfiles of its people.

    Args:
        workers: The workers' names in the inventory.
        hostvars: Ansible's hostvars, without the variables of plays and the defaults of roles.
        own: The current worker -> its projects, from all variables.
    """
    found = {}
    for worker in workers:
        variables = hostvars[worker]
        if worker in own:
            found[worker] = own[worker]
        elif "workspace_projects" in variables or "__workspace_dotfiles" in variables:
            found[worker] = variables.get("workspace_projects", [])
        if worker in found:
            found[worker] = found[worker] + variables.get("__workspace_dotfiles", [])
    return found


def workspace_questions(projects: Mapping[str, list[Project]], only: str) -> list[dict[str, Any]]:
    """Plan which worker asks which forge for a commit: `worker`, and `questions`, each with url, ref and owner.

    The first worker with a project asks for all workers: a worker without the project may lack the owner's account and
    keys.

    Args:
        projects: Worker -> its projects.
        only: workspace_only.
    """
    asked: dict[tuple[str, str, bool], tuple[str, str]] = {}
    for worker, listed in projects.items():
        for project in workspace_chosen(listed, only):
            ref = str(project.get("ref") or "HEAD")
            if project.get("state", "present") == "present" and not COMMIT.fullmatch(ref):
                question = (project["url"], ref, project.get("optional", False))
                asked.setdefault(question, (worker, project.get("owner") or "root"))
    found: dict[str, list[Project]] = {worker: [] for worker in projects}
    for (url, ref, optional), (worker, owner) in sorted(asked.items()):
        found[worker].append({"url": url, "ref": ref, "owner": owner} | ({"optional": True} if optional else {}))
    return [{"worker": worker, "questions": questions} for worker, questions in found.items() if questions]


def workspace_wanted(
    projects: list[Project],
    directory: str,
    environment: str,
    commits: dict[str, str],
    environments: Any,
) -> list[Project]:
    """Return the projects in the form of the module git_workspaces, each with the commit to check out.

    Args:
        projects: The projects.
        directory: workspace_directory.
        environment: workspace_environment.
        commits: "REMOTE REF" -> commit.
        environments: python_environments.
    """
    found = []
    paths = environment_paths(environments)
    for project in projects:
        ref = str(project.get("ref") or "HEAD")
        word = str(project.get("environment") or environment)
        wanted = {
            "path": project_path(project, directory),
            "commit": ref if COMMIT.fullmatch(ref) else commits.get(f"{project['url']} {ref}", ""),
            "environment": paths.get(word, word),
            "owner": project.get("owner") or "root",
        }
        found.append({key: value for key, value in project.items() if key != "ref"} | wanted)
    return found


def workspace_on_disks(projects: list[Project], disks: Any) -> list[Project]:
    """Add `disk` to the result of `workspace_wanted`: the mount point in disks_mounts that contains the clone, or "".

    Invalid entries of disks_mounts are ignored here; the role disks reports them.
    """
    listed = [disk for disk in disks if isinstance(disk, dict)] if isinstance(disks, list) else []
    places = [str(disk.get("path")) for disk in listed if disk.get("state") != "absent"]
    return [
        project | {"disk": next((place for place in places if f"{project['path']}/".startswith(f"{place}/")), "")}
        for project in projects
    ]


class FilterModule:
    """Filters of the role workspace."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "dotfiles_faults": dotfiles_faults,
            "dotfiles_projects": dotfiles_projects,
            "workspace_chosen": workspace_chosen,
            "workspace_environment_faults": workspace_environment_faults,
            "workspace_environment_warnings": workspace_environment_warnings,
            "workspace_faults": workspace_faults,
            "workspace_on_disks": workspace_on_disks,
            "workspace_only_faults": workspace_only_faults,
            "workspace_everywhere": workspace_everywhere,
            "workspace_questions": workspace_questions,
            "workspace_wanted": workspace_wanted,
        }
