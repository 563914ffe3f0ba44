#!/usr/bin/python
"""Module that sets transparent hugepages and reports what the kernel accepted; runs on Python 3.8."""

from __future__ import annotations

import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.mount_points import read

DOCUMENTATION = r"""
module: hugepages
short_description: Set transparent hugepages of the running kernel
description:
  - Writes to O(path) and reads the result. If the kernel does not accept the value, the host stays as it was and a
    warning is shown; this is not a failure, since only speed depends on it.
options:
  value:
    description: The value to choose.
    type: str
    required: true
  path:
    description: The kernel's file.
    type: path
    default: /sys/kernel/mm/transparent_hugepage/enabled
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Set transparent hugepages
  hugepages:
    value: always
"""

RETURN = r"""
chosen:
  description: What the kernel has chosen; empty if it does not say.
  type: str
  returned: always
refused:
  description: Why the kernel did not accept the value; empty if it did.
  type: str
  returned: always
"""


def chosen(text: str) -> str:
    """Given the text of the kernel's file, such as `always [madvise] never`, return the value in brackets."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "value": {"type": "str", "required": True},
            "path": {"type": "path", "default": "/sys/kernel/mm/transparent_hugepage/enabled"},
        },
        supports_check_mode=True,
    )
    path, value = module.params["path"], module.params["value"]
    before = chosen(read(path))
    refused = ""
    if before != value:
        try:
            # Check mode opens the file but writes nothing: on a read-only file system this fails just as a write would.
            with open(path, "r+") as stream:
                if not module.check_mode:
                    stream.write(value)
        except OSError as exc:
            refused = "%s: %s" % (path, exc.strerror)
    after = value if module.check_mode and not refused else chosen(read(path))
    if after != value and not refused:
        refused = "%s: the kernel keeps %s" % (path, after or "an unknown value")
    if refused:
        module.warn("transparent hugepages stay %s, not %s: %s" % (before or "unknown", value, refused))
    module.exit_json(
        changed=before != after,
        chosen=after,
        refused=refused,
        diff={"before": before + "\n", "after": after + "\n"},
    )


if __name__ == "__main__":
    main()
