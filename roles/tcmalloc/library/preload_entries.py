#!/usr/bin/python
"""Module that takes one library out of LD_PRELOAD wherever it is set; runs on Python 3.8."""

from __future__ import annotations

import glob
import os
import re

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.text_files import replace

DOCUMENTATION = r"""
module: preload_entries
short_description: Take one library out of LD_PRELOAD wherever it is set
options:
  files:
    description:
      - Files to look into, as shell patterns. A file named ld.so.preload is read as a list of libraries, pam_env.conf
        in its own syntax, all others as assignments that a shell or pam_env reads.
    type: list
    elements: str
    required: true
  library:
    description: Beginning of the file name of the library, for example libtcmalloc.
    type: str
    required: true
author: [tpu_ops]
"""

EXAMPLES = r"""
- name: Take TCMalloc out of LD_PRELOAD
  preload_entries:
    files: [/etc/environment]
    library: libtcmalloc
"""

RETURN = r"""
files:
  description: Files that were or would be changed.
  type: list
  returned: always
"""

#: LD_PRELOAD=VALUE, and pam_env.conf's DEFAULT=VALUE and OVERRIDE=VALUE, with the value quoted or not.
ASSIGNMENT = r"(?P<name>\b%s)=(?P<quote>[\"']?)(?P<value>%s)(?P=quote)"
SHELL_ASSIGNMENT = re.compile(ASSIGNMENT % ("LD_PRELOAD", r"(?<=[\"'])[^\"'\n]*|[^\s\"';&|]*"))
PAM_ASSIGNMENT = re.compile(ASSIGNMENT % ("(?:DEFAULT|OVERRIDE)", r"(?<=[\"'])[^\"'\n]*|[^\s\"']*"))

#: A line after which a shell needs a command.
OPENS_BLOCK = re.compile(r"(^|[\s;])(then|else|do|\{)\s*(#.*)?$")


def keep_entries(value: str, library: str) -> str:
    """Given the value of LD_PRELOAD, return it without the library; the others keep their order and separator."""
    separator = ":" if ":" in value else " "
    entries = [entry for entry in re.split(r"[:\s]+", value) if entry]
    kept = [entry for entry in entries if not os.path.basename(entry).startswith(library)]
    return value if len(kept) == len(entries) else separator.join(kept)


def strip_list(text: str, library: str) -> str:
    """Given the text of /etc/ld.so.preload, return it without the library."""
    lines = []
    for line in text.splitlines(True):
        listed, mark, comment = line.partition("#")
        kept = keep_entries(listed.strip(), library)
        if kept == listed.strip():
            lines.append(line)
        elif kept or mark:
            lines.append(kept + (" " if kept and mark else "") + mark + (comment if mark else "\n"))
    return "".join(lines)


def strip_assignments(text: str, library: str, pattern: re.Pattern[str], *, commands: bool) -> str:
    """Given the text of a file of assignments, return it without the library in any value that the pattern finds.

    An assignment that is left empty goes, and its line with it where nothing else stands there. Where a shell would
    miss a command then, an empty value or the command `:` stays.
    """
    lines: list[str] = []
    for line in text.splitlines(True):
        if line.lstrip().startswith("#") or (not commands and not line.lstrip().startswith("LD_PRELOAD")):
            lines.append(line)
            continue
        emptied: list[str] = []

        def keep(match: re.Match[str], emptied: list[str] = emptied) -> str:
            kept = keep_entries(match["value"], library)
            if kept == match["value"]:
                return match[0]
            if not kept:
                emptied.append(match[0])
            return "%s=%s%s%s" % (match["name"], match["quote"], kept, match["quote"])

        new = pattern.sub(keep, line)
        rest = pattern.sub("", new) if emptied else new
        if not emptied or rest.strip("; \t\n") not in ("", "export", "LD_PRELOAD", "export LD_PRELOAD"):
            lines.append(new)
        elif commands and (line[0].isspace() or (lines and OPENS_BLOCK.search(lines[-1].rstrip("\n")))):
            lines.append(line[: len(line) - len(line.lstrip())] + ":\n")
    return "".join(lines)


def strip(path: str, text: str, library: str) -> str:
    """Given a file's path and text, return the text without the library."""
    if library not in text:
        return text
    name = os.path.basename(path)
    if name == "ld.so.preload":
        return strip_list(text, library)
    if name == "pam_env.conf":
        return strip_assignments(text, library, PAM_ASSIGNMENT, commands=False)
    return strip_assignments(text, library, SHELL_ASSIGNMENT, commands=True)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "str", "required": True},
            "library": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    diffs = []
    for path in sorted({os.path.realpath(found) for pattern in module.params["files"] for found in glob.glob(pattern)}):
        if not os.path.isfile(path):
            continue
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as stream:
            before = stream.read()
        after = strip(path, before, module.params["library"])
        if after == before:
            continue
        diffs.append({"before_header": path, "after_header": path, "before": before, "after": after})
        if not module.check_mode:
            replace(path, after)
    module.exit_json(changed=bool(diffs), files=[entry["before_header"] for entry in diffs], diff=diffs)


if __name__ == "__main__":
    main()
