#!/usr/bin/python
"""Module that points apt's sources to mirrors; runs on Python 3.8."""

from __future__ import annotations

import contextlib
import difflib
import glob
import json
import os
import re
from typing import Dict, List, Tuple

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.text_files import put, read, replace
from ansible.module_utils.turns import take_turn

DOCUMENTATION = r"""
module: apt_mirrors
short_description: Point apt's sources to mirrors
description:
  - Replaces the beginning of addresses in C(sources.list), C(sources.list.d/*.list) and C(sources.list.d/*.sources),
    except in comments. Files of roles, C(tpu_ops-*), are left alone.
  - Keeps the original text of changed lines in O(record). A line that nobody has changed since is restored as soon as
    its mirror is removed from O(mirrors) or changed.
  - Warns if no source has the address of a mirror. An address that an earlier run replaced counts as present.
options:
  mirrors:
    description: By the beginning of an address, what replaces it. The longest match is used.
    type: dict
    required: true
  record:
    description: File on the host that holds, for each file of sources, its text after and before the change.
    type: path
    default: /var/lib/tpu_ops/apt_mirrors.json
  directory:
    description: Directory of apt's configuration.
    type: path
    default: /etc/apt
  stamp:
    description: File that says that the package lists match the sources; it is removed before the sources change.
    type: path
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

#: Versions of one sources file, each with its text after and before the module's change, which replaces addresses only.
#: The newest pair is first.
Texts = List[Tuple[str, str]]


def mirrored(text: str, mirrors: dict[str, str]) -> str:
    """Given the text of a sources file, replace the addresses that have a mirror, and return the new text."""
    if not mirrors:
        return text
    # Slashes at the end are removed from both addresses: with a slash on one side only, the new address would have one
    # too many or too few.
    pairs = {old.rstrip("/"): new.rstrip("/") for old, new in mirrors.items()}
    ordered = sorted(pairs, key=len, reverse=True)
    pattern = re.compile(r"(?<![^\s])(%s)(?=[/\s]|$)" % "|".join(map(re.escape, ordered)))
    return "".join(
        line if line.lstrip().startswith("#") else pattern.sub(lambda match: pairs[match[1]], line)
        for line in text.splitlines(True)
    )


def addresses(text: str) -> list[str]:
    """Given the text of a sources file, return the addresses in it."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return re.findall(r"(?<!\S)[a-z][a-z0-9+.-]*:/\S+", "\n".join(lines))


def unmatched(mirrors: dict[str, str], texts: list[str]) -> list[str]:
    """Return a warning for each key of base_apt_mirrors that matches no address in the sources files' original texts.

    Each key is tried alone, so that a longer key for the same address does not hide it.
    """
    named = ", ".join(sorted({address for text in texts for address in addresses(text)}))
    return [
        without_login(
            "base_apt_mirrors: no source here has the address %s; the sources are: %s" % (old, named or "none")
        )
        for old in mirrors
        if all(mirrored(text, {old: ""}) == text for text in texts)
    ]


def turned_back(text: str, texts: Texts) -> str:
    """Given a sources file's text and its record, undo the module's changes; lines that others have changed stay."""
    if not texts:
        return text
    left, was = next((pair for pair in texts if pair[0] == text), texts[0])
    lines, then = text.splitlines(True), was.splitlines(True)
    matcher = difflib.SequenceMatcher(None, left.splitlines(True), lines, autojunk=False)
    for start, now, length in matcher.get_matching_blocks():
        lines[now : now + length] = then[start : start + length]
    return "".join(lines)


def without_login(text: str) -> str:
    """Replace the logins in a text's addresses by ***: a login can contain a password or a token."""
    return re.sub(r"//[^/\s]*@", "//***@", text)


def shown(diff: dict[str, str]) -> dict[str, str]:
    """Return the diff with the logins in its addresses replaced by ***."""
    return {key: without_login(text) for key, text in diff.items()}


def read_record(path: str) -> Dict[str, Texts]:
    """Read the record of the module's changes: path of a sources file -> texts; empty if the record does not exist.

    Raises:
        ValueError: The record cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            return {name: [(left, was) for left, was in texts] for name, texts in json.load(stream).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise ValueError("%s: %s" % (path, exc)) from exc


def write_record(path: str, record: Dict[str, Texts]) -> None:
    """Write the record of the module's changes atomically; delete its file if the record is empty."""
    if not record:
        os.unlink(path)
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    put(path, json.dumps(record, indent=1, sort_keys=True), 0o644)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "mirrors": {"type": "dict", "required": True},
            "record": {"type": "path", "default": "/var/lib/tpu_ops/apt_mirrors.json"},
            "directory": {"type": "path", "default": "/etc/apt"},
            "stamp": {"type": "path"},
        },
        supports_check_mode=True,
    )
    take_turn(module, "sources of apt")
    mirrors, place = module.params["mirrors"], module.params["record"]
    try:
        record = read_record(place)
    except ValueError as exc:
        module.fail_json(
            msg="%s; fix or remove the file; if you remove it, its mirrors' lines stay in apt's sources" % exc
        )
    names = ("sources.list", "sources.list.d/*.list", "sources.list.d/*.sources")
    directory = glob.escape(module.params["directory"])
    diffs: list[dict[str, str]] = []
    after_record: dict[str, Texts] = {}
    texts: dict[str, str] = {}
    plains: list[str] = []
    for path in sorted(found for name in names for found in glob.glob(os.path.join(directory, name))):
        if os.path.basename(path).startswith("tpu_ops-"):
            # The role that writes this file has its own variable for the address and would undo the change.
            continue
        before = read(path)
        plain = turned_back(before, record.get(path, []))
        plains.append(plain)
        after = mirrored(plain, mirrors)
        if after != plain:
            after_record[path] = [(after, plain)]
        if after != before:
            texts[path] = after
            diffs.append({"before_header": path, "after_header": path, "before": before, "after": after})
    for warning in unmatched(mirrors, plains):
        module.warn(warning)
    if not module.check_mode:
        if texts and module.params["stamp"]:
            # Without the stamp, the next run refreshes apt's lists even if this run fails before it does so.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(module.params["stamp"])
        if after_record != record:
            # The record is written first: if this run is interrupted between two files, the next run knows the original
            # lines of every file.
            both = {path: after_record.get(path, []) + record.get(path, []) for path in {*after_record, *record}}
            write_record(place, both)
        for path, text in texts.items():
            replace(path, text)
        if after_record != record:
            write_record(place, after_record)
    module.exit_json(changed=bool(diffs), files=[diff["before_header"] for diff in diffs], diff=list(map(shown, diffs)))


if __name__ == "__main__":
    main()
