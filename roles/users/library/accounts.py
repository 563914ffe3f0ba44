#!/usr/bin/python
"""Module that reads the accounts of a host in one call; runs on Python 3.8."""

from __future__ import annotations

import grp
import os
import pwd

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: accounts
short_description: Read accounts, groups and login shells of a host in one call
options:
  names:
    description: Login names to look up; those without an account are left out of the answer.
    type: list
    elements: str
    required: true
  shells:
    description: Paths of login shells to look for.
    type: list
    elements: str
    default: []
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Read the accounts
  accounts:
    names: [ada]
    shells: [/usr/bin/zsh]
"""

RETURN = r"""
users:
  description: By login name, C(comment), C(shell), C(groups) and C(home_exists).
  type: dict
  returned: always
groups:
  description: By name, the members of every group of the host.
  type: dict
  returned: always
missing_shells:
  description: Those of O(shells) that the host cannot execute.
  type: list
  returned: always
"""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "required": True},
            "shells": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    groups = {group.gr_name: sorted(group.gr_mem) for group in grp.getgrall()}
    users = {}
    for name in module.params["names"]:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        users[name] = {
            "comment": entry.pw_gecos,
            "shell": entry.pw_shell,
            "groups": sorted(group for group, members in groups.items() if name in members),
            "home_exists": os.path.isdir(entry.pw_dir),
        }
    missing = [shell for shell in sorted(set(module.params["shells"])) if not os.access(shell, os.X_OK)]
    module.exit_json(changed=False, users=users, groups=groups, missing_shells=missing)


if __name__ == "__main__":
    main()
