#!/usr/bin/python
"""Module that points apt's sources to mirrors; runs on Python 3.8."""

from __future__ import annotations

import glob
import os
import re
import tempfile

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: apt_mirrors
short_description: Point apt's sources to mirrors
description:
  - Replaces the beginning of addresses in C(sources.list), C(sources.list.d/*.list) and C(sources.list.d/*.sources),
    comments left alone.
options:
  mirrors:
    description: By the beginning of an address, what stands there instead. The longest beginning counts.
    type: dict
    required: true
  directory:
    description: Directory of apt's configuration.
    type: path
    default: /etc/apt
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Take packages from the mirror
  apt_mirrors:
    mirrors:
      http://archive.example.com/ubuntu: https://mirror.example.org/ubuntu
"""

RETURN = r"""
files:
  description: Files that were or would be changed.
  type: list
  returned: always
"""


def mirrored(text: str, mirrors: dict[str, str]) -> str:
    """Given the text of a file of sources, return it with the mirrors' addresses."""
    # A slash at the end of one side only would make another address.
    pairs = {old.rstrip("/"): new.rstrip("/") for old, new in mirrors.items()}
    ordered = sorted(pairs, key=len, reverse=True)
    pattern = re.compile(r"(?<![^\s])(%s)(?=[/\s]|$)" % "|".join(map(re.escape, ordered)))
    return "".join(
        line if line.lstrip().startswith("#") else pattern.sub(lambda match: pairs[match[1]], line)
        for line in text.splitlines(True)
    )


def replace(path: str, text: str) -> None:
    """Replace a file's text at once, keeping owner and mode."""
    entry = os.stat(path)
    handle, new = tempfile.mkstemp(prefix=".tpu_ops-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchown(stream.fileno(), entry.st_uid, entry.st_gid)
            os.fchmod(stream.fileno(), entry.st_mode & 0o7777)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "mirrors": {"type": "dict", "required": True},
            "directory": {"type": "path", "default": "/etc/apt"},
        },
        supports_check_mode=True,
    )
    names = ("sources.list", "sources.list.d/*.list", "sources.list.d/*.sources")
    directory = glob.escape(module.params["directory"])
    diffs = []
    for path in sorted(found for name in names for found in glob.glob(os.path.join(directory, name))):
        with open(path, encoding="utf-8") as stream:
            before = stream.read()
        after = mirrored(before, module.params["mirrors"]) if module.params["mirrors"] else before
        if after == before:
            continue
        diffs.append({"before_header": path, "after_header": path, "before": before, "after": after})
        if not module.check_mode:
            replace(path, after)
    module.exit_json(changed=bool(diffs), files=[diff["before_header"] for diff in diffs], diff=diffs)


if __name__ == "__main__":
    main()
