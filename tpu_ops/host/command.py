"""Checks, as the user, whether a command can be executed, and suggests a fix if it cannot."""

from __future__ import annotations

import errno
import os
import re
import stat

from tpu_ops.protocol.wire import encode

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from .person import Person

#: Names of shell builtins and keywords.
_SHELL_BUILTINS = (b"cd", b"export", b"source", b".", b"set", b"unset", b"ulimit", b"umask", b"alias", b"eval", b"exec")
#: The fix for a file that is not on the workers.
_COPY = "; --sync DIR copies a directory, and runs the command in the copy"
#: The first line of a script, which names the interpreter, as the kernel reads it (execve(2)); maximum length.
_INTERPRETER = re.compile(rb"#![ \t]*([^ \t\n\0]+)[^\n]*\n")
_FIRST_LINE = 256
#: Fixes for errors of execve for a file that seemed to be a program.
_NOT_EXECUTED = {
    errno.ENOEXEC: (
        "; the file is no program for this machine, and its first line names no interpreter, as #!/bin/sh does"
    ),
    errno.E2BIG: "; the command and its environment are too long: put long values into a file (--sync, --env-file)",
    errno.ETXTBSY: "; a process is still writing the program: start again once the process has ended",
    errno.EACCES: "; this user has no right to execute the program, or the interpreter in its first line",
    errno.ENOENT: "; the program's loader (ld.so) is not on this worker: the program was built for another system",
}


class NotReady(Exception):
    """The command cannot be executed; the text has the reason and the fix."""


def enter(cwd: str, person: Person) -> None:
    """Change to the working directory of a command; this process must already run as the user."""
    try:
        os.chdir(encode(cwd))
    except OSError as exc:
        raise NotReady("working directory {}: {}; {}".format(cwd, exc.strerror, _way_in(cwd, person, exc))) from exc


def _way_in(cwd: str, person: Person, exc: OSError) -> str:
    """Return the fix for a directory that cannot be entered: a home, a copy of --sync below it, or a clone of --git."""
    home = os.path.normpath(person.home)
    is_home, is_copy = os.path.normpath(cwd) == home, os.path.normpath(cwd).startswith(home.rstrip("/") + "/")
    if exc.errno == errno.EACCES:
        where = "`namei -l {}` on this worker shows the directory that {} may not enter".format(cwd, person.name)
        if is_home or is_copy:
            return where
        return where + "; change the owner, group or mode of the project, or run as its owner with --user"
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        if is_home:
            text = (
                "the home of {} is missing on this worker: mount the home's file system, or `tpu_ops configure` "
                "the worker"
            )
            return text.format(person.name)
        return "the directory was removed: start again, with {}".format("--sync DIR" if is_copy else "--git")
    return "`findmnt -T {}` and `dmesg` on this worker show the error of the directory's file system".format(cwd)


def find_program(name: bytes, path: bytes) -> bytes:
    """Return the path of the program that a command's first word names; this process must already run as the user."""
    if b"/" in name:
        _require_program(name, _hint(name))
        return name
    there = b""
    for folder in path.split(b":"):
        candidate = os.path.join(folder or b".", name)
        if _is_program(candidate):
            _require_program(candidate, _hint(name))
            return candidate
        there = there or (candidate if os.path.lexists(candidate) and not os.path.isdir(candidate) else b"")
    what = "{} is not on PATH ({})".format(os.fsdecode(name), os.fsdecode(path))
    raise NotReady(what + _instead(name, path, there))


def _instead(name: bytes, path: bytes, there: bytes) -> str:
    """Return the fix for a program that is not on PATH, as text that is appended to the problem.

    Args:
        name: The name of the program.
        path: The value of PATH.
        there: A file of this name on PATH that is not executable; empty if there is none.
    """
    if line := _hint(name):
        return line
    if there:
        try:
            _require_program(there, "")
        except NotReady as exc:
            return "; {}".format(exc)
    if os.path.isfile(name):
        return "; for the file in {}: -- ./{}".format(os.getcwd(), os.fsdecode(name))
    if name == b"python" and any(_is_program(os.path.join(folder, b"python3")) for folder in path.split(b":")):
        return "; without an environment there is only python3 here: -- python3, or name an environment with --venv"
    return "; install it on this worker, give its full path, or name its environment with --venv"


def _hint(name: bytes) -> str:
    """Guess what the user meant by the name of a missing program; return the fix as text appended to the problem."""
    if name.endswith(b".py"):
        return "; to run it with Python: -- python {}".format(os.fsdecode(name))
    if b"=" in name and os.fsdecode(name.partition(b"=")[0]).isidentifier():
        return "; set a variable with --env NAME=VALUE"
    if name in _SHELL_BUILTINS or any(mark in name for mark in b" \n;|&<>$*~"):
        return "; for a shell line: --shell -- 'LINE'"
    return ""


def _is_program(path: bytes) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _require_program(path: bytes, hint: str) -> None:
    """Check that a path is an executable program, as far as that is possible without executing it.

    Args:
        path: The path.
        hint: The fix that the program's name suggests, from `_hint`; can be empty.
    """
    shown = os.fsdecode(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as exc:
        if os.path.islink(path):
            target = os.fsdecode(os.readlink(path))
            fix = "; install its target, or name another program" if path.startswith(b"/") else _COPY
            raise NotReady("{} is a link to {}, which does not exist{}".format(shown, target, fix)) from exc
        here = "on this worker" if path.startswith(b"/") else "in {}".format(os.getcwd())
        raise NotReady("there is no {} {}{}".format(shown, here, hint if "--shell" in hint else _COPY)) from exc
    except OSError as exc:
        fix = "`namei -l {}` on this worker shows which directory on the path this user may not enter".format(shown)
        raise NotReady("{} cannot be looked at: {}; {}".format(shown, exc.strerror, fix)) from exc
    if stat.S_ISDIR(mode):
        raise NotReady("{} is a directory, not an executable file; name a program in the directory".format(shown))
    if not stat.S_ISREG(mode):
        raise NotReady("{} is not an executable file{}".format(shown, hint or "; name a program"))
    if not os.access(path, os.X_OK):
        raise NotReady("{} is not an executable file{}".format(shown, hint or _executable(path, mode)))
    if why := _without_interpreter(path):
        raise NotReady("{} cannot be executed: {}".format(shown, why))


def _executable(path: bytes, mode: int) -> str:
    """Return the fix for a file that this process has no right to execute, as text that is appended to the problem."""
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        return "; its file system is mounted with noexec: keep the program on another file system"
    if mode & 0o111:
        return "; only other users may execute it: change its owner, group or mode"
    return "; `chmod +x` makes it executable (--sync copies the mode too)"


def _without_interpreter(path: bytes) -> str:
    """Return the problem if the interpreter of a script is missing; else, or if the file is no script, ""."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = _INTERPRETER.match(file.read(_FIRST_LINE))
    except OSError:
        return ""
    if not found or os.path.exists(found.group(1)):
        return ""
    name = os.fsdecode(found.group(1))
    if name.endswith("\r"):
        return "the file has Windows line ends, so that its first line names no program; dos2unix fixes that"
    return "its first line names {}, which is not on this worker; install it, or name another interpreter".format(name)


def not_executed(name: str, exc: OSError) -> str:
    """Return why the kernel did not execute a program, and the fix."""
    return "{}: {}{}".format(name, exc.strerror or exc, _NOT_EXECUTED.get(exc.errno or 0, ""))
