"""The contents of a virtual environment, read without running a program; runs on Python 3.8."""

from __future__ import annotations

import csv
import io
import json
import os
import re

from ansible.module_utils.installed_packages import PIN, dist_infos, normalised
from ansible.module_utils.text_files import put

#: Endings of files that change when the packages are used, so that their length is not compared.
_VOLATILE = (".pyc", ".pyo")


def editable(directory: str) -> bool:
    """Given a directory with a package's metadata, return whether the package is installed as editable (PEP 610)."""
    try:
        with open(os.path.join(directory, "direct_url.json"), encoding="utf-8") as stream:
            return bool(json.load(stream).get("dir_info", {}).get("editable"))
    except (OSError, ValueError, AttributeError):
        return False


def from_index(directory: str) -> bool:
    """Given a directory with a package's metadata, return whether the package came from a package index."""
    return not os.path.exists(os.path.join(directory, "direct_url.json"))


def intact(directory: str) -> bool:
    """Given a directory with a package's metadata, return whether all its files exist with the recorded length."""
    try:
        rows = record(directory)
        for path, _, size in rows:
            if not path.endswith(_VOLATILE):
                length = os.stat(os.path.join(os.path.dirname(directory), path)).st_size
                if size and int(size) != length:
                    return False
    except (OSError, ValueError):
        return False
    return bool(rows)


def record(directory: str) -> list[list[str]]:
    """Given a directory with a package's metadata, return the recorded path, hash and length of each file.

    Raises:
        OSError: The package has no file RECORD.
    """
    with open(os.path.join(directory, "RECORD"), encoding="utf-8", newline="") as stream:
        return [row for row in csv.reader(stream) if len(row) == 3]


def correct_record(directory: str) -> None:
    """Given the metadata directory of a package that was just installed, adapt its record to the existing files.

    Raises:
        OSError: The package has no file RECORD, or it cannot be written.
    """
    rows = []
    for path, digest_of_file, size in record(directory):
        try:
            length = os.stat(os.path.join(os.path.dirname(directory), path)).st_size
        except FileNotFoundError:
            continue
        rows.append((path, digest_of_file, str(length) if size else ""))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    # The file is replaced and not changed, since it may be a link to the file in uv's cache.
    put(os.path.join(directory, "RECORD"), text.getvalue(), 0o644)


def damaged(path: str) -> list[str]:
    """Return the packages of an environment with files that are missing or have another length than recorded."""
    return [name for name, (_, entry) in dist_infos(path).items() if not intact(entry)]


def pin_lines(lock: str) -> list[str]:
    """Given the text of a lock file, return its pins as constraints, each with its condition on Python and platform."""
    found = re.findall(PIN + r"[ \t]*(;(?:(?!--hash=)[^\\\n#])*)?", lock, re.MULTILINE)
    return ["{}=={} {}".format(*pin).strip() for pin in found]


def named(lock: str) -> set[str]:
    """Given the text of a lock file, return the names of all packages in it, pinned or with a URL (PEP 508)."""
    found = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)[ \t]*(?:\[[^]]*\])?[ \t]*(?:==|@)", lock, re.MULTILINE)
    return {normalised(name) for name in found}


def fully_hashed(lock: str) -> bool:
    """Given the text of a lock file, return whether every package in it has a hash."""
    # A requirement can continue on the next line after a backslash.
    logical = re.sub(r"\\\n", " ", lock).splitlines()
    entries = [line for line in logical if line.strip() and not line.lstrip().startswith(("#", "-"))]
    return bool(entries) and all("--hash=" in line for line in entries)
