#!/usr/bin/python
"""Module that removes one library from LD_PRELOAD wherever it is set; runs on Python 3.8."""

from __future__ import annotations

import glob
import os
import re
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.text_files import changed_lines, replace
from ansible.module_utils.turns import FILES, take_turn

DOCUMENTATION = r"""
module: preload_entries
short_description: Remove one library from LD_PRELOAD wherever it is set
options:
  files:
    description:
      - Files to check, as shell patterns. A file named ld.so.preload is read as a list of libraries, pam_env.conf in
        its own syntax, all others as assignments that a shell or pam_env reads.
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
- name: Remove TCMalloc from LD_PRELOAD
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

#: A command substitution that contains no other one; an entry may contain it.
OUTPUT = r"\$\([^()\n]*\)|`[^`\n]*`"
#: An entry of LD_PRELOAD: a path, or an expansion that adds entries, such as ${LD_PRELOAD:+$LD_PRELOAD:}.
JOINED = r"\$\{\w+:?[-=+][^{}\n]*\}"
ENTRY = re.compile(r"%s|(?:\$\{\w+\}|%s|(?!\$\{)[^\s:])+" % (JOINED, OUTPUT))

#: Assignments in files: LD_PRELOAD=VALUE, and pam_env.conf's DEFAULT=VALUE and OVERRIDE=VALUE; quotes are optional.
ASSIGNMENT = r"(?P<name>\b%s)=(?P<quote>[\"']?)(?P<value>%s)(?P=quote)"
SHELL_ASSIGNMENT = re.compile(
    ASSIGNMENT % ("LD_PRELOAD", r"(?<=[\"'])[^\"'\n]*|(?:%s|\$\{[^{}\n\"']*\}|[^\s\"';&|])*" % OUTPUT)
)
PAM_ASSIGNMENT = re.compile(ASSIGNMENT % ("(?:DEFAULT|OVERRIDE)", r"(?<=[\"'])[^\"'\n]*|[^\s\"']*"))

#: The shells that read files such as /etc/profile.
SHELLS = ("/bin/sh", "/bin/bash")


def keep_entries(value: str, library: str) -> str:
    """Given the value of LD_PRELOAD, return it without the library; other entries keep their order and separator."""
    is_library = re.compile(r"(?:^|[\s/])%s[^/]*$" % re.escape(library))
    entries = ENTRY.findall(value)
    kept = [entry for entry in entries if re.match(JOINED, entry) or not is_library.search(entry)]
    if kept == entries:
        return value
    return (":" if ":" in ENTRY.sub("", value) else " ").join(kept)


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
    """Given the text of a file with assignments, remove the library from the values that the pattern matches.

    An assignment that becomes empty is removed, and also its line if the line contains nothing else. If the shell needs
    a command there, as in the body of an `if`, the line becomes `:`.
    """
    lines: list[str] = []
    for line in text.splitlines(True):
        if line.lstrip().startswith("#") or (not commands and not line.lstrip().startswith("LD_PRELOAD")):
            lines.append(line)
            continue
        new = pattern.sub(lambda match: match[0].replace(match["value"], keep_entries(match["value"], library)), line)
        rest = pattern.sub(lambda match: match[0] if match["value"] else "", new)
        if new == line or rest.strip("; \t\n") not in ("", "export", "LD_PRELOAD", "export LD_PRELOAD"):
            lines.append(new)
        elif commands and not readers("".join(lines)):
            lines.append(line[: len(line) - len(line.lstrip())] + ":\n")
    return "".join(lines)


def readers(text: str) -> list[str]:
    """Return the shells that can parse a text as a script."""

    def reads(shell: str) -> bool:
        entry = text.encode("utf-8", "surrogateescape")
        return subprocess.run([shell, "-n"], input=entry, stderr=subprocess.DEVNULL, check=False).returncode == 0

    return [shell for shell in SHELLS if os.access(shell, os.X_OK) and reads(shell)]


def strip(path: str, text: str, library: str) -> str:
    """Given a file's path and text, return the text without the library in LD_PRELOAD."""
    if library not in text:
        return text
    name = os.path.basename(path)
    if name == "ld.so.preload":
        return strip_list(text, library)
    if name == "pam_env.conf":
        return strip_assignments(text, library, PAM_ASSIGNMENT, commands=False)
    return strip_assignments(text, library, SHELL_ASSIGNMENT, commands=True)


def is_for_shells(path: str) -> bool:
    """Return whether shells read a file."""
    return not path.endswith((".conf", "ld.so.preload", "/environment"))


def lines_left(path: str, text: str, library: str) -> list[int]:
    """Return the numbers of the lines that still seem to add the library to LD_PRELOAD."""
    if os.path.basename(path) == "ld.so.preload":
        return []
    given = re.compile(r"\bLD_PRELOAD\b.*=.*" + re.escape(library))
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if not line.lstrip().startswith("#") and given.search(line)]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "str", "required": True},
            "library": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    take_turn(module, FILES)
    diffs, faults = [], []
    library = module.params["library"]
    for path in sorted({os.path.realpath(found) for pattern in module.params["files"] for found in glob.glob(pattern)}):
        if not os.path.isfile(path):
            continue
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as stream:
            before = stream.read()
        after = strip(path, before, library)
        broken = []
        if after != before and is_for_shells(path):
            left = readers(after)
            broken = [shell for shell in readers(before) if shell not in left]
        if broken:
            faults.append(
                "%s: %s could no longer read it without %s; remove the entry by hand" % (path, broken[0], library)
            )
            continue
        for number in lines_left(path, after, library):
            module.warn("%s, line %d: %s is used there in a way that is not understood" % (path, number, library))
        if after == before:
            continue
        diffs.append(changed_lines(path, before, after))
        if not module.check_mode:
            replace(path, after)
    files = [entry["before_header"] for entry in diffs]
    if faults:
        module.fail_json(msg="; ".join(faults), changed=bool(diffs), files=files, diff=diffs)
    module.exit_json(changed=bool(diffs), files=files, diff=diffs)


if __name__ == "__main__":
    main()
