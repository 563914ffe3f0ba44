#!/usr/bin/python
"""Module that keeps all files, directories and links of a role in one call; runs on Python 3.8."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.file_entries import File, nothing_asked
from ansible.module_utils.guarded_paths import Refused
from ansible.module_utils.turns import FILES, take_turn

DOCUMENTATION = r"""
module: managed_files
short_description: Keep files, directories and links of a host as they are listed, in one call
description:
  - All entries are checked before the first is changed, so that a refusal leaves everything as it was.
  - Files are replaced atomically. A symbolic link on the way is followed only if nobody but root could have created it;
    a link in the place of a file is replaced. A block is written to the file that such a link points to; the link is
    refused if that file is missing, or if others than root can change it.
  - Missing directories on the way are created, owned by root, with mode 0755, unless somebody other than root can write
    to the place where they go.
  - Skipped if C(worker.files) of M(worker_facts) shows that there is nothing to change.
options:
  files:
    description: The entries, in the order in which they are applied.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      state:
        description:
          - V(file) has O(files[].content); if that is left out, the file must exist and keeps its own.
          - V(block) has O(files[].content) between two marked lines; the rest of the file stays. Without content the
            lines are removed; a file without them, or anything else in its place, stays as it is. A first line without
            a last one is refused.
          - V(link) points to O(files[].target), which must exist.
          - V(absent) removes a file, a link or an empty directory.
        type: str
        choices: [file, block, directory, link, absent]
        default: file
      content:
        description: The text.
        type: str
      base64:
        description: Instead of O(files[].content), content that is not text.
        type: str
      once:
        description: Whether a file that already exists stays as it is, whatever it contains and whoever owns it.
        type: bool
        default: false
      target:
        description: What the link points to.
        type: str
      target_from:
        description: Variable that O(files[].target) comes from, named in the error if the target is missing.
        type: str
      owner:
        description: Name or number of the owner; by default root, and for V(block) the owner of the existing file.
        type: str
      group:
        description: Name or number of the group; by default root, and for V(block) the group of the existing file.
        type: str
      mode:
        description:
          - Permissions as an octal string. By default 0755 for directories, for V(block) those of the existing file,
            and 0644 for all other files.
        type: str
      begins:
        description:
          - With V(absent), the beginning of the file to remove. A file that begins differently, or anything that is not
            a file, belongs to somebody else and stays.
        type: str
      unless:
        description: With V(block), a regular expression for lines of others; a file with such a line gets no block.
        type: str
      validate:
        description: Command that accepts the new file by exiting with 0; C(%s) is replaced by its path.
        type: str
  secret:
    description: Whether the contents are secret. Then no diff is returned, and the task must have C(no_log).
    type: bool
    default: false
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Configure the things
  managed_files:
    files:
      - { path: /etc/things.d, state: directory }
      - path: /etc/things.d/10-tpu_ops.conf
        content: "{{ lookup('ansible.builtin.template', 'things.conf.j2') }}"
        validate: /usr/sbin/things --check %s
      - { path: /etc/localtime, state: link, target: /usr/share/zoneinfo/Etc/UTC }
"""

RETURN = r"""
changed_paths:
  description: Paths of the entries that were or would be changed, in the order of O(files).
  type: list
  returned: always
"""


def validation_fault(module: AnsibleModule, command: str, text: str) -> str:
    """Return why a file with this text fails the entry's command `validate`; empty if it passes."""
    if command.count("%s") != 1:
        return "validate needs %s once"
    program = command.split(maxsplit=1)[0]
    if not (os.access(program, os.X_OK) if os.path.isabs(program) else module.get_bin_path(program)):
        # Check mode does not install the package that contains the program.
        return "" if module.check_mode else "%s, which checks it, is missing" % program
    handle, path = tempfile.mkstemp(dir=module.tmpdir)
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        stream.write(text)
    try:
        code, out, err = module.run_command(command % path)
    finally:
        os.unlink(path)
    return "" if code == 0 else "%s rejects it: %s" % (program, (err or out).strip().replace(path, "the new file"))


def plan(module: AnsibleModule, entry: dict[str, Any]) -> dict[str, str] | None:
    """Return the diff between the worker and an entry; None if nothing is to change.

    Raises:
        Refused: The entry cannot be applied.
    """
    if nothing_asked(entry):
        return None
    file = File(entry, check=module.check_mode)
    try:
        if not file.differs():
            return None
        after = file.after()
        if file.state == "link" and not module.check_mode:
            target = os.path.join(os.path.dirname(file.path), entry["target"])
            made = [other["path"] for other in module.params["files"] if other["state"] in ("file", "directory")]
            if not os.path.exists(target) and os.path.normpath(target) not in made:
                way = (
                    "; set %s to something that exists on this host" % entry["target_from"]
                    if entry["target_from"]
                    else ""
                )
                raise Refused("its target %s is missing%s" % (entry["target"], way))
        if entry["validate"] and file.before != after:
            fault = validation_fault(module, entry["validate"], after or "")
            if fault:
                raise Refused(fault)
        diff: dict[str, str] = file.diff()
    finally:
        file.close()
    return diff


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "state": {
                        "type": "str",
                        "choices": ["file", "block", "directory", "link", "absent"],
                        "default": "file",
                    },
                    "content": {"type": "str"},
                    "base64": {"type": "str"},
                    "once": {"type": "bool", "default": False},
                    "target": {"type": "str"},
                    "target_from": {"type": "str"},
                    "owner": {"type": "str"},
                    "group": {"type": "str"},
                    "mode": {"type": "str"},
                    "begins": {"type": "str"},
                    "unless": {"type": "str"},
                    "validate": {"type": "str"},
                },
            },
            "secret": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    take_turn(module, FILES)
    if module.params["secret"] and not module.no_log:
        module.fail_json(msg="the contents are secret: give the task no_log: true")
    faults, diffs, changes = [], [], []
    for entry in module.params["files"]:
        try:
            diff = plan(module, entry)
        except (Refused, OSError) as exc:
            faults.append("%s: %s" % (entry["path"], exc))
            continue
        if diff is not None:
            changes.append(entry)
            diffs.append(diff)
    if faults:
        module.fail_json(msg="; ".join(faults), changed_paths=[])
    done: list[str] = []
    for entry in changes if not module.check_mode else []:
        try:
            file = File(entry, check=False)
            try:
                file.apply()
            finally:
                file.close()
        except (Refused, OSError) as exc:
            module.fail_json(msg="%s: %s" % (entry["path"], exc), changed=bool(done), changed_paths=done)
        done.append(entry["path"])
    module.exit_json(
        changed=bool(changes),
        changed_paths=[entry["path"] for entry in changes],
        diff=[] if module.params["secret"] else diffs,
    )


if __name__ == "__main__":
    main()
