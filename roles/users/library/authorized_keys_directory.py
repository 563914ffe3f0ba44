#!/usr/bin/python
"""Module that keeps a directory of authorized_keys files; runs on Python 3.8."""

from __future__ import annotations

import os
import stat

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: authorized_keys_directory
short_description: Make a root-owned directory hold exactly one file of ssh keys per person
options:
  path:
    description: The directory.
    type: path
    required: true
  keys:
    description: By login name, the list of public keys. Files of other names are removed.
    type: dict
    required: true
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Set the keys
  authorized_keys_directory:
    path: /etc/ssh/authorized_keys.d
    keys:
      ada: [ssh-ed25519 AAAA...]
"""

RETURN = r"""
written:
  description: Files that were or would be written.
  type: list
  returned: always
removed:
  description: Files that were or would be removed.
  type: list
  returned: always
"""

HEADER = "# Written by Ansible; changes are lost.\n"


def read(path: str) -> str | None:
    """Return a file's text if it is a root-owned regular file of mode 0644, else None."""
    try:
        entry = os.lstat(path)
        if not stat.S_ISREG(entry.st_mode) or stat.S_IMODE(entry.st_mode) != 0o644 or entry.st_uid or entry.st_gid:
            return None
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def directory_right(path: str) -> bool:
    """Return whether the directory is there, owned by root and writable by root only."""
    try:
        entry = os.lstat(path)
    except FileNotFoundError:
        return False
    return (
        stat.S_ISDIR(entry.st_mode) and stat.S_IMODE(entry.st_mode) == 0o755 and not entry.st_uid and not entry.st_gid
    )


def write(path: str, text: str) -> None:
    """Write the file atomically, root-owned, mode 0644."""
    handle = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        os.fchown(stream.fileno(), 0, 0)
        os.fchmod(stream.fileno(), 0o644)
    os.replace(path + ".new", path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "keys": {"type": "dict", "required": True, "no_log": False},
        },
        supports_check_mode=True,
    )
    path = module.params["path"]
    files = {name: HEADER + "".join(key + "\n" for key in keys) for name, keys in sorted(module.params["keys"].items())}
    before = {name: read(os.path.join(path, name)) for name in sorted(os.listdir(path))} if os.path.isdir(path) else {}
    written = [name for name in files if before.get(name) != files[name]]
    removed = [name for name in before if name not in files]
    right = directory_right(path)
    if not module.check_mode:
        if not right:
            os.makedirs(path, mode=0o755, exist_ok=True)
            os.chown(path, 0, 0)
            os.chmod(path, 0o755)
        for name in removed:
            os.unlink(os.path.join(path, name))
        for name in written:
            write(os.path.join(path, name), files[name])
    module.exit_json(
        changed=bool(written or removed or not right),
        written=written,
        removed=removed,
        diff={
            "before": "".join("%s:\n%s" % (name, text or "") for name, text in before.items()),
            "after": "".join("%s:\n%s" % (name, text) for name, text in files.items()),
        },
    )


if __name__ == "__main__":
    main()
