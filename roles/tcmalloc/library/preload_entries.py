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

#: An expansion with a word of its own (group 1 to 3), or the output of a command; neither with another one inside.
EXPANSION = r"\$\{(\w+)(:?[-=+])([^{}\n]*)\}"
OUTPUT = r"\$\([^()\n]*\)|`[^`\n]*`"
#: The parts of one entry of the list, and what separates two entries.
PARTS = re.compile(r"%s|%s|[^\s:$`]+|\$\{[^{}\n]*\}|." % (EXPANSION, OUTPUT))
SPLIT = re.compile(r"((?:\$\{[^{}\n]*\}|%s|[^\s:])+)" % OUTPUT)

#: LD_PRELOAD=VALUE, and pam_env.conf's DEFAULT=VALUE and OVERRIDE=VALUE, with the value quoted or not.
ASSIGNMENT = r"(?P<name>\b%s)=(?P<quote>[\"']?)(?P<value>%s)(?P=quote)"
SHELL_ASSIGNMENT = re.compile(
    ASSIGNMENT % ("LD_PRELOAD", r"(?<=[\"'])[^\"'\n]*|(?:%s|\$\{[^{}\n\"']*\}|[^\s\"';&|])*" % OUTPUT)
)
PAM_ASSIGNMENT = re.compile(ASSIGNMENT % ("(?:DEFAULT|OVERRIDE)", r"(?<=[\"'])[^\"'\n]*|[^\s\"']*"))

#: The end of a line after which a shell needs a command.
WANTS_COMMAND = re.compile(r"((^|[\s;])(then|else|do|\{|!)|&&|\|\||\||\\|\))\s*(\s#.*)?$")
#: The shells that read such files.
SHELLS = ("/bin/sh", "/bin/bash")


def keep_entries(value: str, library: str) -> str:
    """Given the value of LD_PRELOAD, return it without the library; the others keep their order and separator.

    Shells expand values: the library also goes where it is the word of ``${NAME:-WORD}`` or what a command prints.
    """
    entries = SPLIT.findall(value)
    kept = [entry for entry in (keep_parts(entry, library) for entry in entries) if entry]
    return value if kept == entries else (":" if ":" in "".join(SPLIT.split(value)[::2]) else " ").join(kept)


def keep_parts(entry: str, library: str) -> str:
    """Given one entry of the list, return what is left without the library: expansions that join it to others."""
    kept = []
    is_library = False
    for part in PARTS.finditer(entry):
        text, name, operator, word = part.group(0, 1, 2, 3)
        if name:
            # A separator at an end of the word joins it to what is next to the expansion.
            inner = keep_entries(word, library)
            kept.append((True, text if inner == word else "${%s%s%s}" % (name, operator, inner)))
        elif text[:2] == "$(" or text[0] == "`":
            is_library = is_library or library in text
            kept.append((False, text))
        else:
            is_library = is_library or os.path.basename(text).startswith(library)
            kept.append((False, text))
    return "".join(text for joins, text in kept if joins or not is_library)


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

    An assignment that becomes empty is removed, with its line if nothing else is in it. If a shell would then miss a
    command, an empty value or the command `:` is left.
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
        elif commands and (line[0].isspace() or wants_command(lines)):
            lines.append(line[: len(line) - len(line.lstrip())] + ":\n")
    return "".join(lines)


def wants_command(lines: list[str]) -> bool:
    """Given the lines of a shell's file so far, return whether a command must follow."""
    last = next((line for line in reversed(lines) if line.strip() and not line.lstrip().startswith("#")), "")
    return bool(WANTS_COMMAND.search(last.rstrip("\n")))


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


def is_for_shells(path: str) -> bool:
    """Return whether shells read a file."""
    return not path.endswith((".conf", "ld.so.preload", "/environment"))


def broken_for(before: str, after: str) -> str:
    """Return the shell that could read a text before, and cannot read it after; empty where there is none."""

    def reads(shell: str, text: str) -> bool:
        entry = text.encode("utf-8", "surrogateescape")
        return subprocess.run([shell, "-n"], input=entry, stderr=subprocess.DEVNULL, check=False).returncode == 0

    shells = [shell for shell in SHELLS if os.access(shell, os.X_OK)]
    return next((shell for shell in shells if not reads(shell, after) and reads(shell, before)), "")


def lines_left(path: str, text: str, library: str) -> list[int]:
    """Return the numbers of the lines that still give the library to LD_PRELOAD, as far as that can be seen."""
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
        shell = broken_for(before, after) if after != before and is_for_shells(path) else ""
        if shell:
            faults.append(
                "%s: %s could no longer read it without %s; remove the entry by hand" % (path, shell, library)
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
