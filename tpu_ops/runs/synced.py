"""Program that compares a directory on a worker with a tree, and removes files that an earlier sync put there.

The source of this module and of `protocol/marks.py` is sent to the workers, where the system's Python (3.8 on the
oldest images) executes it as the user. File names are bytes; in JSON, each byte is one character.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping

from tpu_ops.protocol.marks import FOLDER, LISTS, PARENT, listed, mark, opened, said, say, take, turn_lock, use_lock

_LISTS = os.path.join(PARENT, LISTS)


def look(name: bytes, marks: Mapping[bytes, str]) -> dict[str, object]:
    """Return the entries that differ from the tree, which of these entries no sync put there, and the stale files."""
    place, before = os.path.join(PARENT, name), listed(PARENT, name)
    differs, taken = [], []
    for entry, wanted in marks.items():
        # An entry below a symbolic link counts as missing: the link is removed before a directory takes its place.
        found = "" if _behind_link(place, entry) else mark(os.path.join(place, entry))
        if found != wanted:
            differs.append(entry)
            own = entry in (before or ()) or (found == FOLDER and _all_own(place, entry, before or set()))
            if found and not own:
                taken.append(entry)
    shown = {"differs": differs, "taken": taken, "stale": list(_stale(place, before or set(), marks))}
    return {
        **{key: [entry.decode("latin-1") for entry in entries] for key, entries in shown.items()},
        "listed": before == _files(marks),
    }


def prepare(name: bytes, marks: Mapping[bytes, str]) -> dict[str, object]:
    """Create the directory, remove stale files of earlier syncs, and write the list of the tree's files.

    The list is written before the transfer, so that files of a failed transfer count as synced.
    """
    place = os.path.join(PARENT, name)
    os.makedirs(place, exist_ok=True)
    os.makedirs(_LISTS, exist_ok=True)
    for entry in _stale(place, listed(PARENT, name) or set(), marks):
        _remove(os.path.join(place, entry))
        _remove_parents(place, entry, marks)
    for entry in _files(marks):
        path = os.path.join(place, entry)
        if os.path.isdir(path) and not os.path.islink(path) and not _behind_link(place, entry):
            _remove_folders(path)
    handle, path = tempfile.mkstemp(dir=_LISTS, prefix=b".")
    with os.fdopen(handle, "wb") as file:
        file.write(b"\0".join(sorted(_files(marks))))
    os.replace(path, os.path.join(_LISTS, name))
    return {}


def _all_own(place: bytes, folder: bytes, before: Collection[bytes]) -> bool:
    """Return whether a directory contains at least one file, and syncs put all its files there."""
    held: set[bytes] = set()
    for path, names, files in os.walk(os.path.join(place, folder)):
        links = [name for name in names if os.path.islink(os.path.join(path, name))]
        held.update(os.path.relpath(os.path.join(path, name), place) for name in [*files, *links])
    return bool(held) and held <= set(before)


def _remove(path: bytes) -> None:
    """Remove a file, even from a read-only directory that belongs to the user."""
    # If workers share the home directory, each of them removes the same files.
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(path)
        except PermissionError:
            parent = os.path.dirname(path)
            mode = stat.S_IMODE(os.stat(parent).st_mode)
            os.chmod(parent, mode | stat.S_IRWXU)
            try:
                os.unlink(path)
            finally:
                os.chmod(parent, mode)


def _remove_parents(place: bytes, entry: bytes, marks: Mapping[bytes, str]) -> None:
    """Remove those parent directories of a removed file that are now empty and that are not in the tree."""
    folder = os.path.dirname(entry)
    with contextlib.suppress(OSError):  # the directory is not empty
        while folder and folder not in marks:
            os.rmdir(os.path.join(place, folder))
            folder = os.path.dirname(folder)


def _remove_folders(top: bytes) -> None:
    """Remove a directory that contains no files, with all directories in it."""
    for path, names, _ in os.walk(top, topdown=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(os.path.join(path, name))
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(top)


def _files(marks: Mapping[bytes, str]) -> set[bytes]:
    return {entry for entry, kind in marks.items() if kind != FOLDER}


def _stale(place: bytes, before: set[bytes], marks: Mapping[bytes, str]) -> Iterator[bytes]:
    """Yield the existing files that an earlier sync put there and that are no longer in the tree."""
    for entry in sorted(before - _files(marks)):
        if entry.startswith(b"/") or b".." in entry.split(b"/") or _behind_link(place, entry):
            continue
        path = os.path.join(place, entry)
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
            yield entry


def _behind_link(place: bytes, entry: bytes) -> bool:
    """Return whether a parent directory in a path is a symbolic link, so that the file might be anywhere."""
    parts = entry.split(b"/")
    return any(os.path.islink(os.path.join(place, *parts[:count])) for count in range(1, len(parts)))


def hold(name: bytes, facts: Mapping[str, object]) -> None:
    """Lock a directory for one sync until standard input ends; print each answer as a line of JSON.

    Each line on standard input is a request: ``claim`` also excludes runs, ``free`` admits runs again, and any other
    line ends the lock. If the lock is taken, ``busy`` in the answer names its holder.

    Args:
        name: The name of the directory.
        facts: Facts about the caller: ``who``, and a ``token`` that is unique to the command.
    """
    with contextlib.suppress(OSError):  # the transfer will report the error
        os.makedirs(_LISTS, exist_ok=True)
    turn, use = opened(turn_lock(PARENT, name)), opened(use_lock(PARENT, name))
    # If workers share the home directory, one worker holds both locks for all of them.
    shared = False
    if not take(turn):
        other = said(turn)
        if other.get("token") != facts["token"]:
            return _answer({"busy": other}, facts)
        shared = True
    else:
        say(turn, dict(facts, pid=os.getpid()))
    _answer({}, facts)
    for line in iter(sys.stdin.readline, ""):
        if line.strip() == "claim":
            _answer({} if shared or take(use) else {"busy": said(use)}, facts)
        elif line.strip() == "free":
            if use is not None and not shared:
                fcntl.flock(use, fcntl.LOCK_UN)
            _answer({}, facts)
        else:
            return None
    return None


def _answer(answer: Mapping[str, object], facts: Mapping[str, object]) -> None:
    """Print an answer on its own line, with the token: the login shell can print other lines."""
    sys.stdout.write("\n" + json.dumps({**answer, "token": facts["token"]}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Execute the request on standard input and print the answer as a line of JSON."""
    request = json.loads(sys.stdin.readline())
    if request["action"] == "hold":
        hold(request["name"].encode("latin-1"), request["facts"])
        return 0
    marks = {entry.encode("latin-1"): kind for entry, kind in request["marks"].items()}
    try:
        answer = {"look": look, "prepare": prepare}[request["action"]](request["name"].encode("latin-1"), marks)
    except OSError as exc:
        sys.stderr.write("{}: {}\n".format(os.fsdecode(exc.filename or b""), exc.strerror))
        return 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
