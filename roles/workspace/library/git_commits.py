#!/usr/bin/python
"""Module that asks forges for the commits of branches and tags; runs on Python 3.8."""

from __future__ import annotations

import pwd
from typing import Any

from ansible.module_utils.as_person import PersonFault, as_person
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.programs import at_remote

DOCUMENTATION = r"""
module: git_commits
short_description: Ask forges for the commits of branches and tags
description:
  - Read-only. In check mode a forge that cannot be asked causes only a warning, since the same run may install git,
    create the account or pin the forge's key; an answer counts as usual.
options:
  questions:
    description: What to ask.
    type: list
    elements: dict
    required: true
    suboptions:
      url:
        description: The remote.
        type: str
        required: true
      ref:
        description: Branch or tag, or V(HEAD); with C(refs/heads/) or C(refs/tags/) if both have the name.
        type: str
        required: true
      owner:
        description: The account that asks, with its keys.
        type: str
        required: true
      optional:
        description: Whether a forge that does not answer, or has no such ref, is only a warning.
        type: bool
        default: false
  timeout:
    description: Seconds that one question may take.
    type: int
    default: 600
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Ask which commit the branch is
  git_commits:
    questions: [{ url: "https://example.org/vision.git", ref: main, owner: root }]
"""

RETURN = r"""
commits:
  description: Commit by remote and ref, separated by a space.
  type: dict
  returned: always
shown:
  description: The same as lines for people.
  type: list
  returned: always
"""


def chosen(answer: str, ref: str) -> str:
    """Given the output of git ls-remote and a ref, return the commit of the branch or tag with this name.

    Raises:
        PersonFault: There is no such branch or tag, or both with different commits.
    """
    found = {}
    for line in answer.splitlines():
        commit, _, name = line.partition("\t")
        found[name] = commit
    names = [ref] if ref == "HEAD" or ref.startswith("refs/") else ["refs/heads/" + ref, "refs/tags/" + ref]
    # The commit of an annotated tag is in the line with ^{}; the tag's own line names the tag object (git-ls-remote(1),
    # --refs).
    commits = {name: found.get(name + "^{}", found[name]) for name in names if name in found}
    if len(set(commits.values())) > 1:
        raise PersonFault(
            "the remote has both a branch and a tag %s; write refs/heads/%s or refs/tags/%s" % (ref, ref, ref)
        )
    if not commits:
        raise PersonFault("the remote has no branch or tag %s; if this is a commit, give all of its 40 digits" % ref)
    return next(iter(commits.values()))


def ask(url: str, ref: str, timeout: int) -> str:
    """Ask a remote for a branch or tag, and return the output of git ls-remote.

    Raises:
        PersonFault: The remote does not answer.
    """
    answer: str = at_remote(["git", "ls-remote", "--", url, ref, ref + "^{}"], timeout)
    return answer


def main() -> None:
    """Run the module."""
    text: dict[str, Any] = {"type": "str", "required": True}
    module = AnsibleModule(
        argument_spec={
            "questions": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {"url": text, "ref": text, "owner": text, "optional": {"type": "bool", "default": False}},
            },
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    commits: dict[str, str] = {}
    shown: list[str] = []
    faults: list[str] = []
    for question in module.params["questions"]:
        fault = module.warn if question["optional"] else faults.append
        unanswered = module.warn if module.check_mode else fault
        url, ref, owner = question["url"], question["ref"], question["owner"]
        try:
            account = pwd.getpwnam(owner)
        except KeyError:
            unanswered("%s: the owner %s has no account on the worker that asks" % (url, owner))
            continue
        try:
            answer = as_person(account, lambda: ask(url, ref, module.params["timeout"]))  # noqa: B023
        except PersonFault as exc:
            unanswered("%s, asked by %s: %s" % (url, owner, exc))
            continue
        try:
            commit = chosen(answer, ref)
        except PersonFault as exc:
            fault("%s, asked by %s: %s" % (url, owner, exc))
            continue
        commits["%s %s" % (url, ref)] = commit
        shown.append("%s %s is commit %s" % (url, ref, commit))
    if faults:
        module.fail_json(msg="workspace_projects: %s" % "; ".join(faults), commits=commits, shown=shown)
    module.exit_json(changed=False, commits=commits, shown=shown)


if __name__ == "__main__":
    main()
