#!/usr/bin/python
"""Module that checks out projects at given commits and never loses work that exists only in a clone."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
from collections.abc import Callable
from typing import Any, Dict

from ansible.module_utils.active_run import RunUnknown, active_run
from ansible.module_utils.as_person import PersonFault, as_person
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.clones import Clone
from ansible.module_utils.editables import Environment
from ansible.module_utils.environment_sets import write_extras
from ansible.module_utils.guarded_paths import guarded_way
from ansible.module_utils.mount_points import parse_mounts, read
from ansible.module_utils.programs import keep_safe
from ansible.module_utils.turns import ENVIRONMENTS, GIT, take_turn, tell_change

DOCUMENTATION = r"""
module: git_workspaces
short_description: Keep clones at given commits without ever losing what exists only in them
description:
  - A clone is made next to its place and moved there when it is complete. It is moved to another commit only if it has
    no changed files and no commits that the remote does not have. If one project fails, the others are still handled,
    and the module fails at the end.
  - Check mode warns about what it cannot check yet, since the same run may install git and uv.
  - A project is installed together with what its environment lists (the role python records that) and with what other
    editable projects in it need. A project that does not go with these is refused, and its environment stays as it is.
  - Everything is done in processes of the owners. Clones of root are registered with git as safe for everybody.
options:
  projects:
    description: The clones.
    type: list
    elements: dict
    required: true
    suboptions:
      name: { description: Name of the project., type: str, required: true }
      url: { description: The remote., type: str, required: true }
      commit: { description: The full commit hash; empty if check mode does not know it., type: str, required: true }
      path: { description: The clone., type: path, required: true }
      disk: { description: Mount point of the disk that it is on; empty if it is on none., type: str, default: "" }
      owner: { description: Account that owns the clone., type: str, required: true }
      group: { description: Group of the directory., type: str, default: "" }
      mode: { description: Permissions of the directory., type: str, default: "0755" }
      editable: { description: What to install., type: list, elements: str, default: [] }
      environment: { description: The virtual environment., type: path, required: true }
      constraints: { description: Files of constraints., type: list, elements: str, default: [] }
      state: { description: Whether it should exist., type: str, choices: [present, absent], default: present }
      scripts:
        description: Programs below the clone. The owner runs the first one that exists, once at each commit.
        type: list
        elements: str
        default: []
      optional: { description: Whether failures and local changes are only warnings., type: bool, default: false }
  uv:
    description: The program uv.
    type: path
    required: true
  cache_dir:
    description: uv's cache for root; others have one of their own.
    type: path
    required: true
  pinned_packages:
    description: Packages that an installation leaves at their version.
    type: list
    elements: str
    default: []
  on_local_changes:
    description: Whether local changes fail or are only reported.
    type: str
    choices: [fail, warn]
    default: fail
  during_runs:
    description: Whether a clone may be moved or removed, and an environment changed, while a training run is active.
    type: bool
    default: true
  system:
    description: git's configuration for everybody.
    type: path
    default: /etc/gitconfig
  timeout:
    description: Seconds that one step may take.
    type: int
    default: 600
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Keep the clone at a commit
  git_workspaces:
    projects:
      - name: vision
        url: https://example.org/vision.git
        commit: 0123456789abcdef0123456789abcdef01234567
        path: /opt/workspaces/vision
        owner: root
        environment: /opt/venvs/jax
    uv: /opt/uv/bin/uv
    cache_dir: /var/cache/uv
"""

RETURN = r"""
commits:
  description: The commit of each project that exists, by name.
  type: dict
  returned: always
paths:
  description: The path of each project that should exist, by name.
  type: dict
  returned: always
actions:
  description: What was or would be done, one line each.
  type: list
  returned: always
"""

Project = Dict[str, Any]

#: Name of the lock that a process holds while it changes people's git clones on a worker.
PROJECTS = "projects"

#: Suffix of a clone's name while the clone is being removed.
GONE = ".tpu_ops-gone"


def is_free(path: str) -> bool:
    """Return whether a path does not exist or is an empty directory."""
    return not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path))


def clear(*leftovers: str) -> None:
    """Delete directories that an interrupted run left behind, if they exist."""
    for path in leftovers:
        if os.path.lexists(path):
            shutil.rmtree(path)


class Workspace:
    """One project on this host, with the checks and changes of the module."""

    def __init__(
        self, module: AnsibleModule, project: Project, account: pwd.struct_passwd, later: list[str] | None = None
    ) -> None:
        self.module = module
        self.check: bool = module.check_mode
        self.project = project
        self.account = account
        self.path: str = project["path"]
        self.new = self.path + ".tpu_ops-new"
        self.gone = self.path + GONE
        self.timeout: int = module.params["timeout"]
        self.environment = Environment(
            project["environment"], module.params["uv"], module.params["pinned_packages"], self.timeout, later
        )
        self.actions: list[str] = []
        self.commit = ""

    def clone(self, path: str) -> Clone:
        """Return a `Clone` for a path, for use in a process with the owner's rights."""
        return Clone(path, self.account.pw_name, self.timeout)

    def as_owner(self, work: Callable[[], Any]) -> Any:
        """Run a function in a process with the owner's rights."""
        os.environ["UV_CACHE_DIR"] = (
            os.path.join(self.account.pw_dir, ".cache/uv") if self.account.pw_uid else self.module.params["cache_dir"]
        )
        return as_person(self.account, work)

    def as_keeper(self, work: Callable[[], Any]) -> Any:
        """Run a function as root if only root can change the clone's parent directories, else with the owner's rights.

        Raises:
            PersonFault: The owner is root, and others can change a parent directory.
        """
        if guarded_way(os.path.dirname(self.path)):
            return work()
        if self.account.pw_uid == 0 == os.geteuid():
            raise PersonFault(
                "others than root can write to a parent directory of %s; set another owner than root for the project"
                % self.path
            )
        return self.as_owner(work)

    def bring(self) -> None:
        """Check out the project at its commit, and install it.

        Raises:
            PersonFault: The checkout or the installation fails.
        """
        url, commit = self.project["url"], self.project["commit"]
        if not commit and not self.check:
            raise PersonFault("the commit is not known, since no worker of this run asked the remote for it; run again")
        self.must_have_disk()
        kept = ""
        if self.as_keeper(lambda: is_free(self.path)):
            if not self.check:
                self.as_keeper(self.make_place)
                self.as_owner(lambda: self.clone(self.new).make(url, commit))
                self.as_keeper(lambda: os.rename(self.new, self.path))
            self.actions.append("clone %s at %s" % (self.path, commit or "the commit of its ref"))
            self.commit = commit
        elif self.check and shutil.which("git") is None:
            self.module.warn("%s: git is not installed yet, so %s was not checked" % (self.project["name"], self.path))
        else:
            if not commit:
                self.module.warn("%s: it is not known yet whether %s moves" % (self.project["name"], self.path))
            elif not self.check and self.as_owner(lambda: self.clone(self.path).moves(commit)):
                self.spare_run(PROJECTS, self.path, "moved")
            done = self.as_owner(lambda: self.clone(self.path).move(url, commit, check=self.check))
            self.actions += done["actions"]
            self.commit, kept = done["commit"], done["kept"]
            for text in done["warnings"]:
                self.module.warn(text)
        optional = self.project["optional"]
        if kept and self.module.params["on_local_changes"] == "fail" and not optional:
            raise PersonFault(kept)
        if kept:
            self.module.warn(kept)
        self.set_rights()
        if self.project["editable"]:
            self.install()
        if self.project["scripts"] and not kept:
            self.run_script()

    def run_script(self) -> None:
        """Run the first of the project's scripts that the clone has, unless it has run at this commit.

        Raises:
            PersonFault: The script fails; the next run of the module starts it again.
        """
        if self.check and self.as_keeper(lambda: is_free(self.path)):
            return
        scripts = self.project["scripts"]
        name = self.as_owner(lambda: self.clone(self.path).script_to_run(scripts))
        if name and not self.check:
            self.as_owner(lambda: self.clone(self.path).run_script(name))
        if name:
            self.actions.append("run %s" % os.path.join(self.path, name))

    def must_have_disk(self) -> None:
        """Reject a project whose disk is not mounted: a later mount would hide the clone.

        Raises:
            PersonFault: The disk is not mounted. Check mode raises nothing, since it does not mount disks.
        """
        disk = self.project["disk"]
        if disk and not self.check and all(each.target != disk for each in parse_mounts(read("/proc/self/mountinfo"))):
            raise PersonFault(
                "the project's disk is not mounted at %s; run site.yml with --tags disks, which mounts the disk or says"
                " why not" % disk
            )

    def spare_run(self, turn: str, path: str, changed: str) -> None:
        """Prevent new runs from now on, and reject the change if a run is active and during_runs is false.

        Args:
            turn: The lock that this process holds for the change.
            path: The clone or environment that is to change.
            changed: The change as a participle, for example "moved".

        Raises:
            PersonFault: A run is active, or it is unknown whether one is.
        """
        tell_change(turn, [path])
        if self.module.params["during_runs"]:
            return
        try:
            run = active_run()
        except RunUnknown as exc:
            raise PersonFault("%s is not %s: %s" % (path, changed, exc)) from exc
        if run:
            raise PersonFault(
                "%s is not %s, since the run %s is active on this worker and may use it; wait for it, or end it with"
                " `tpu_ops stop`" % (path, changed, run)
            )

    def make_place(self) -> None:
        """Create an empty directory of the owner for the clone; delete what an interrupted run left there."""
        os.makedirs(os.path.dirname(self.path), mode=0o755, exist_ok=True)
        clear(self.new, self.gone)
        os.mkdir(self.new, 0o755)
        os.chown(self.new, self.account.pw_uid, self.account.pw_gid)

    def set_rights(self) -> None:
        """Set group and permissions of the clone's directory.

        Raises:
            PersonFault: The group does not exist.
        """
        mode, group = int(self.project["mode"], 8), self.project["group"]
        try:
            gid = grp.getgrnam(group).gr_gid if group else self.account.pw_gid
        except KeyError:
            if self.check:
                return
            raise PersonFault(
                "this worker has no group %s; set group in workspace_projects, or create the group" % group
            ) from None
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            found = os.fstat(handle)
            if (stat.S_IMODE(found.st_mode), found.st_gid) == (mode, gid) or found.st_uid != self.account.pw_uid:
                return
            if not any(action.startswith("clone") for action in self.actions):
                self.actions.append("give %s group %d and mode %04o" % (self.path, gid, mode))
            if not self.check:
                os.fchown(handle, -1, gid)
                os.fchmod(handle, mode)
        finally:
            os.close(handle)

    def install(self) -> None:
        """Install the project's editable parts, unless the environment already has them.

        Raises:
            PersonFault: The environment is missing or belongs to another user, or uv fails.
        """
        where, owner = self.environment.path, self.account.pw_name
        try:
            uid = os.lstat(os.path.join(where, "pyvenv.cfg")).st_uid
        except FileNotFoundError:
            if not self.check:
                raise PersonFault(
                    "the virtual environment %s does not exist; create it, or name one of python_environments" % where
                ) from None
            uid = self.account.pw_uid
        if uid != self.account.pw_uid:
            raise PersonFault(
                "the environment %s belongs to uid %d, and an editable installation runs code of %s; give %s their"
                " own environment, or give the project to the environment's owner" % (where, uid, owner, owner)
            )
        if self.check and (self.actions or not os.path.exists(where)):
            self.actions.append("install %s into %s" % (self.project["name"], where))
            return
        if self.check and not os.access(self.environment.uv, os.X_OK):
            self.module.warn(
                "%s: uv is not installed yet, so it is not known what changes in %s" % (self.project["name"], where)
            )
            return
        parts = [part.partition("[") for part in self.project["editable"]]
        projects = [os.path.normpath(os.path.join(self.path, part)) + "".join(extras) for part, *extras in parts]
        constraints = [os.path.join(self.path, path) for path in self.project["constraints"]]

        plan: list[str] = self.as_owner(lambda: self.environment.missing(projects, constraints))
        if plan and not self.check:
            take_turn(self.module, ENVIRONMENTS)
            self.spare_run(ENVIRONMENTS, where, "changed")
            self.as_owner(lambda: self.environment.install(projects, constraints, dry=False))
        if not self.check:
            self.as_owner(lambda: write_extras(where, projects))
        if plan:
            self.actions.append("install into %s: %s" % (where, ", ".join(plan)))

    def remove(self) -> None:
        """Uninstall the project from its environment, and remove the clone.

        Raises:
            PersonFault: The clone contains work that exists nowhere else.
        """
        leaving = self.as_keeper(lambda: [path for path in (self.path, self.gone) if os.path.lexists(path)])
        there = self.path in leaving
        if there and self.check and shutil.which("git") is None:
            self.module.warn("%s: git is not installed yet, so %s was not checked" % (self.project["name"], self.path))
        elif there:
            self.as_owner(lambda: self.clone(self.path).must_be_empty_of_work())
        names = self.as_owner(lambda: self.environment.below(self.path))
        if there and not self.check:
            self.spare_run(PROJECTS, self.path, "removed")
        if names and not self.check:
            take_turn(self.module, ENVIRONMENTS)
            self.spare_run(ENVIRONMENTS, self.environment.path, "changed")
        self.actions += ["remove %s" % path for path in leaving]
        if names:
            self.actions.append("uninstall %s from %s" % (", ".join(names), self.environment.path))
        if not self.check:
            if names:
                self.as_owner(lambda: self.environment.remove(names))
            if leaving:
                self.as_keeper(lambda: self.delete(there=there))

    def delete(self, *, there: bool) -> None:
        """Rename the clone before deleting it: otherwise an interrupted deletion would look like changed files."""
        clear(self.gone)
        if there:
            os.rename(self.path, self.gone)
            clear(self.gone)


def account_of(project: Project) -> pwd.struct_passwd | None:
    """Return the account of a project's owner; for a project with state absent, the account that owns the clone."""
    try:
        for path in (project["path"], project["path"] + GONE):
            if project["state"] == "absent" and os.path.lexists(path):
                return pwd.getpwuid(os.lstat(path).st_uid)
        return pwd.getpwnam(project["owner"])
    except KeyError:
        return None


def main() -> None:
    """Run the module."""
    text: dict[str, Any] = {"type": "str"}
    needed = {"type": "str", "required": True}
    texts = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "projects": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": needed,
                    "url": needed,
                    "commit": needed,
                    "path": {"type": "path", "required": True},
                    "disk": dict(text, default=""),
                    "owner": needed,
                    "group": dict(text, default=""),
                    "mode": dict(text, default="0755"),
                    "editable": texts,
                    "environment": {"type": "path", "required": True},
                    "constraints": texts,
                    "state": dict(text, choices=["present", "absent"], default="present"),
                    "scripts": texts,
                    "optional": {"type": "bool", "default": False},
                },
            },
            "uv": {"type": "path", "required": True},
            "cache_dir": {"type": "path", "required": True},
            "pinned_packages": texts,
            "during_runs": {"type": "bool", "default": True},
            "on_local_changes": dict(text, choices=["fail", "warn"], default="fail"),
            "system": {"type": "path", "default": "/etc/gitconfig"},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    take_turn(module, PROJECTS)
    os.umask(0o022)
    faults: list[str] = []
    actions, gone, commits = [], [], {}
    for position, project in enumerate(module.params["projects"], 1):
        account = account_of(project)
        name = project["name"]
        fault = module.warn if project["optional"] else faults.append
        if account is None:
            if project["state"] == "present" and not module.check_mode:
                fault(
                    "%s: the owner %s has no account; set owner in workspace_projects, or create the account"
                    % (name, project["owner"])
                )
            elif project["state"] == "present":
                actions.append("%s: clone %s" % (name, project["path"]))
            continue
        later = [other["path"] for other in module.params["projects"][position:]]
        workspace = Workspace(module, project, account, later)
        try:
            if project["state"] == "present":
                workspace.bring()
            else:
                workspace.remove()
                gone.append(project["path"])
        except (PersonFault, OSError) as exc:
            fault("%s: %s" % (name, exc))
        actions += ["%s: %s" % (name, action) for action in workspace.actions]
        if workspace.commit:
            commits[name] = workspace.commit
    roots = [
        project["path"]
        for project in module.params["projects"]
        if project["owner"] == "root" and project["name"] in commits
    ]
    if roots or gone:
        take_turn(module, GIT)
    try:
        actions += keep_safe(roots, gone, module.params["system"], module.params["timeout"], check=module.check_mode)
    except PersonFault as exc:
        faults.append(str(exc))
    paths = {project["name"]: project["path"] for project in module.params["projects"] if project["state"] == "present"}
    result = {"changed": bool(actions), "actions": actions, "commits": commits, "paths": paths}
    if faults:
        module.fail_json(msg="workspace_projects: %s" % "; ".join(faults), **result)
    module.exit_json(diff={"prepared": "".join(action + "\n" for action in actions)}, **result)


if __name__ == "__main__":
    main()
