#!/usr/bin/python
"""Module that creates and fills virtual environments with uv; runs on Python 3.8."""

from __future__ import annotations

import os
import pwd
from typing import Any

from ansible.module_utils.active_run import RunUnknown, active_run
from ansible.module_utils.as_person import PersonFault, as_person
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.environment_guard import stranger_in
from ansible.module_utils.environment_work import Environment, brought, check_owner, give
from ansible.module_utils.installed_packages import packages
from ansible.module_utils.turns import ENVIRONMENTS, take_turn, tell_change
from ansible.module_utils.uv_program import Fault, Uv

DOCUMENTATION = r"""
module: uv_environments
short_description: Create virtual environments with uv and give them one set of packages
description:
  - The work is split into steps, so that hosts can agree on one set of packages before they install it. Only
    V(pythons), V(fill) and V(record) change anything.
  - Everything in an environment is done with the rights of its owner.
  - Without a lock, packages from the index leave that neither O(environments[].requirements) nor projects need. With a
    lock, they leave if O(environments[].exact) or O(environments[].agreed) is set. If the owner is not root, packages
    that were never listed stay: the owner may have added them. They also stay if nothing is listed.
  - Files for another version of Python are kept in the environment's directory C(.old-TIME) until the new ones are
    complete.
  - Packages from the index that editable projects require belong to the set. They are resolved together with the
    requirements, and are not removed. A set that a project does not work with is refused.
  - Refuses environments in which others than root and the owner could place code that then runs with the owner's
    rights.
  - While a training run is active, V(fill) refuses to change existing environments, before it changes any of them. A
    program would otherwise import modules of two versions. Check mode only warns of this. During the change, the
    launcher starts no run. O(during_runs) turns all of this off.
  - Playbooks that use this module on one host at the same time take turns, and so do installations from one
    O(cache_dir), so that hosts that share it download each package once.
options:
  step:
    description:
      - V(look) reads the packages of the environments and asks uv whether they are sufficient.
      - V(pythons) has uv install the Python versions in O(pythons).
      - V(resolve) has uv write the lock of each environment. Installed versions are kept if the requirements allow it.
      - V(fill) creates environments that are missing or whose Python does not run, and installs their locks.
      - V(record) writes the listed requirements into each environment. The role workspace reads them when it installs
        projects.
    type: str
    choices: [look, pythons, resolve, fill, record]
    required: true
  uv:
    description: The program uv.
    type: path
    required: true
  cache_dir:
    description: uv's cache for environments of root. Other owners use one in their home.
    type: path
    required: true
  pythons:
    description: Python versions that uv is to install.
    type: list
    elements: str
    default: []
  python_dir:
    description: Directory in which uv installs O(pythons).
    type: path
    default: /opt/python
  environments:
    description: The environments.
    type: list
    elements: dict
    default: []
    suboptions:
      name: {description: "Name of the environment.", type: str, required: true}
      variable: {description: "Variable that lists the environment, for messages.", type: str, default: ""}
      path: {description: "Path of the environment.", type: path, required: true}
      owner: {description: "Account that may write to it.", type: str, default: root}
      python: {description: "Path of a Python, or the version of one that uv installed.", type: str, required: true}
      python_version: {description: "Version of that Python as major.minor.", type: str, required: true}
      requirements: {description: "Requirements as pip reads them.", type: list, elements: str, default: []}
      constraints: {description: "Constraints as pip reads them.", type: list, elements: str, default: []}
      find_links: {description: "Pages to search for packages in addition to the index.", type: list, elements: str,
                   default: []}
      lock: {description: "Text of a lock file, instead of the requirements.", type: str, default: ""}
      exact: {description: "Whether to remove packages that are not in the lock, except editable ones.", type: bool,
              default: false}
      agreed: {description: "Whether workers agreed on the lock. Packages from the index that the lock lacks are then
                             removed.", type: bool, default: false}
      forbidden: {description: "Pattern of package names that no lock may contain.", type: str, default: ""}
      proof: {description: "Python code that must succeed in the environment.", type: str, default: ""}
  moving:
    description: Directories of projects that the role workspace is about to bring to another commit, or to remove. A
      set that such a project does not work with is installed all the same, and a warning names the project.
    type: list
    elements: path
    default: []
  during_runs:
    description: Whether V(fill) may change environments that exist while a training run is active.
    type: bool
    default: false
  slice_index:
    description:
      - URL of the server that worker 0 of the slice runs for the others (C(files/slice_index.py)). V(pythons) and
        V(fill) download from it what uv verifies by a hash that it has from elsewhere, and use the source if that
        fails. Empty means none.
    type: str
    default: ""
  timeout:
    description: Seconds that one command may take, including waiting for another host's turn with the cache.
    type: int
    default: 1800
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: See what the environments hold
  uv_environments:
    step: look
    uv: /opt/uv/bin/uv
    cache_dir: /var/cache/uv
    environments:
      - name: jax
        path: /opt/venvs/jax
        python: /usr/bin/python3.12
        python_version: "3.12"
        requirements: ["jax==0.10.2"]
"""

RETURN = r"""
environments:
  description:
    - By name, the state of the environment after the step.
    - C(fresh) is true if the environment must be created or recreated. C(plan) has one line for each package that is
      changed or would be. C(damaged) names packages with missing files. C(packages) has the versions by name.
    - C(digest) is equal on two hosts if Python and packages are equal. C(key) is equal if one set of packages is
      sufficient for both hosts. C(projects) is equal if the editable projects have the same requirements.
    - C(editable) names the packages that are editable installations. C(local) names those from a URL or a directory.
      C(overruled) names the editable projects that do not work with the set.
    - C(locked) is true if O(environments[].lock) is given. C(recorded) is true if the listed requirements are recorded
      in the environment.
  type: dict
  returned: always
locks:
  description: By name, the text of the lock, from the step V(resolve); empty in check mode if uv or Python is missing.
  type: dict
  returned: always
missing_pythons:
  description: Which O(pythons) are missing or do not run, at the start of the step.
  type: list
  returned: always
"""


#: If the project at its new commit does not work with the packages either, the role workspace reports an error.
OVERRULED = (
    "environment %s: the project %s does not work with the listed packages; they are installed all the same, since the"
    " role workspace is about to bring the project to the commit that workspace_projects names"
)

STEPS = ["look", "pythons", "resolve", "fill", "record"]


def place(wanted: dict[str, Any]) -> str:
    """Return the beginning of messages about an environment: its variable and name."""
    return "%senvironment %s: " % (wanted["variable"] and wanted["variable"] + ": ", wanted["name"])


def listed(found: dict[str, str]) -> str:
    """Return packages as a text for diffs, one line NAME==VERSION each."""
    return "".join("%s==%s\n" % item for item in sorted(found.items()))


def bring(versions: list[str], uv: Uv) -> str:
    """Install versions of Python with uv, and return why the slice's index was not used.

    Raises:
        Fault: uv failed; the text names the variables to change.
    """
    try:
        with uv.take_turn():
            missed: str = uv.run_sharing("python", "install", "--no-bin", "--reinstall", *versions)[1]
            return missed
    except Fault as exc:
        raise Fault(
            "uv did not install Python %s, which python_version or python_more_versions asks for: %s; uv downloads its"
            " builds from GitHub: if a worker cannot reach it, name a mirror's list in python_uv_downloads_json_url, or"
            " set python_source to deadsnakes or distribution" % (", ".join(versions), exc)
        ) from exc


def tell_missed(reason: str, module: AnsibleModule) -> None:
    """Warn if there is a reason why the slice's index was not used."""
    if reason:
        module.warn("downloaded from the source, and not from worker 0 of the slice: %s" % reason)


def exists(path: str) -> bool:
    """Return whether there is an environment at a path, which programs may be using."""
    return any(os.path.lexists(os.path.join(path, part)) for part in ("bin/python", "pyvenv.cfg"))


def spare_run(there: list[dict[str, Any]], module: AnsibleModule) -> None:
    """Record that existing environments are about to change, so that no run starts, and reject the change during a run.

    Raises:
        Fault: A run is active. In check mode this is only a warning.
    """
    if not there or module.params["during_runs"]:
        return
    if not module.check_mode:
        tell_change(ENVIRONMENTS, [wanted["path"] for wanted in there])
    run = active_run()
    if not run:
        return
    text = (
        "environment %s: not changed, since the run %s is active on this worker and could then import packages of two"
        " versions; wait for it, end it with `tpu_ops stop`, or set python_fill_during_runs: true"
        % (", ".join(wanted["name"] for wanted in there), run)
    )
    if not module.check_mode:
        raise Fault(text)
    module.warn(text)


def look(wanted: dict[str, Any], module: AnsibleModule) -> dict[str, Any]:
    """Return the state of an environment, and warn of projects in it that do not work with the listed packages.

    Raises:
        Fault: The state cannot be read, or the listed packages conflict with a project.
    """
    state: dict[str, Any] = work(wanted, "look", module)
    for project in state["overruled"]:
        module.warn(OVERRULED % (wanted["name"], project))
    return state


def work(wanted: dict[str, Any], step: str, module: AnsibleModule) -> Any:
    """Run one step of the module for an environment, with the rights of its owner.

    Raises:
        Fault: The step failed.
    """
    program, timeout = module.params["uv"], module.params["timeout"]
    try:
        account = pwd.getpwnam(wanted["owner"])
    except KeyError:
        # The account may be created later in this playbook, so the environment counts as missing.
        if step == "look" or module.check_mode:
            environment = Environment(dict(wanted, moving=[]), Uv(program, module.params["cache_dir"], timeout))
            return "" if step == "resolve" else environment.unmade()
        raise Fault("the owner %s has no account; set owner, or create the account" % wanted["owner"]) from None
    reason = stranger_in(wanted["path"], account.pw_uid)
    if reason:
        raise Fault(
            "%s would run code that others than root%s could change: %s; give it another path or owner"
            % (wanted["owner"], " and %s" % wanted["owner"] if account.pw_uid else "", reason)
        )
    mine = account.pw_uid == os.geteuid()
    cache = module.params["cache_dir"] if mine else "%s/.cache/uv" % account.pw_dir
    uv = Uv(program, cache, timeout, module.params["slice_index"])
    if not mine:
        check_owner(wanted["path"], account)
    if step == "fill" and not mine:
        give(wanted["path"], account)

    def act() -> Any:
        environment = Environment(dict(wanted, moving=module.params["moving"]), uv)
        try:
            # In check mode, uv or the environment's Python may not be installed yet.
            if step == "resolve" and module.check_mode and not environment.can_resolve():
                return ""
            return getattr(environment, step)()
        except Fault as exc:
            raise PersonFault(str(exc)) from exc

    return act() if mine else as_person(account, act)


def main() -> None:
    """Run the module."""
    words: dict[str, Any] = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "step": {"type": "str", "required": True, "choices": STEPS},
            "uv": {"type": "path", "required": True},
            "cache_dir": {"type": "path", "required": True},
            "pythons": words,
            "python_dir": {"type": "path", "default": "/opt/python"},
            "environments": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    **{name: {"type": "str", "required": True} for name in ("name", "python", "python_version")},
                    "path": {"type": "path", "required": True},
                    "owner": {"type": "str", "default": "root"},
                    **dict.fromkeys(("requirements", "constraints", "find_links"), words),
                    **{name: {"type": "str", "default": ""} for name in ("variable", "lock", "forbidden", "proof")},
                    **{name: {"type": "bool", "default": False} for name in ("exact", "agreed")},
                },
            },
            "moving": {"type": "list", "elements": "path", "default": []},
            "during_runs": {"type": "bool", "default": False},
            "slice_index": {"type": "str", "default": ""},
            "timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    take_turn(module, ENVIRONMENTS)
    os.umask(0o022)
    step, directory = module.params["step"], module.params["python_dir"]
    states: dict[str, Any] = {}
    locks: dict[str, str] = {}
    result: dict[str, Any] = {"changed": False, "missing_pythons": [], "environments": states, "locks": locks}
    before: dict[str, dict[str, str]] = {}
    needed: list[dict[str, Any]] = []
    where = ""
    try:
        missing = [version for version in module.params["pythons"] if not brought(directory, version)]
        result["missing_pythons"] = missing
        if step == "pythons" and missing:
            result["changed"] = True
            if not module.check_mode:
                names = ("uv", "cache_dir", "timeout", "slice_index")
                tell_missed(bring(missing, Uv(*(module.params[name] for name in names))), module)
        for wanted in module.params["environments"]:
            name = wanted["name"]
            where = place(wanted)
            if step == "resolve":
                locks[name] = work(wanted, step, module)
            elif step == "record":
                result["changed"] = True
                if not module.check_mode:
                    states[name] = work(wanted, step, module)
            elif step in ("look", "fill"):
                before[name] = packages(wanted["path"])
                states[name] = look(wanted, module)
                if step == "fill" and (states[name]["fresh"] or states[name]["plan"]):
                    needed.append(wanted)
        where = ""
        spare_run([wanted for wanted in needed if exists(wanted["path"])], module)
        for wanted in needed:
            where = place(wanted)
            result["changed"] = True
            if not module.check_mode:
                states[wanted["name"]] = work(wanted, step, module)
                tell_missed(states[wanted["name"]].pop("missed"), module)
        where = ""
    except (Fault, PersonFault, RunUnknown, OSError) as exc:
        module.fail_json(msg="%s%s" % (where, exc), **result)
    if step == "fill":
        result["diff"] = [
            {
                "before_header": name,
                "after_header": name,
                "before": listed(before[name]),
                "after": listed(state["packages"]),
            }
            if not module.check_mode
            else {"prepared": "".join("%s: %s\n" % (name, line) for line in state["plan"])}
            for name, state in states.items()
        ]
    module.exit_json(**result)


if __name__ == "__main__":
    main()
