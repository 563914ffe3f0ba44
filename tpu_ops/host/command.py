"""Whether a command can be executed as asked, looked at by what is its person by then, and what to do where not."""

from __future__ import annotations

import errno
import os
import re
import stat

from tpu_ops.protocol.wire import encode

from . import TYPE_CHECKING

if TYPE_CHECKING:
    from .person import Person

#: Words that only a shell knows.
_SHELL_BUILTINS = (b"cd", b"export", b"source", b".", b"set", b"unset", b"ulimit", b"umask", b"alias", b"eval", b"exec")
#: What brings a file to the workers.
_COPY = "; --sync DIR copies a directory, and runs the command in the copy"
#: A script's first line as far as the kernel reads it (execve(2)), with its interpreter.
_INTERPRETER = re.compile(rb"#![ \t]*([^ \t\n\0]+)[^\n]*\n")
_FIRST_LINE = 256
#: What helps where the kernel does not execute what looked like a program.
_NOT_EXECUTED = {
    errno.ENOEXEC: "; it is no program of this machine, nor does its first line name what runs it, as #!/bin/sh does",
    errno.E2BIG: "; the command and its environment are too long: put what is long into a file (--sync, --env-file)",
    errno.ETXTBSY: "; somebody still writes it: start again once that has ended",
    errno.EACCES: "; it, or what its first line names, is not for this user to execute",
    errno.ENOENT: "; what it needs to be loaded (ld.so) is not on this worker: it was built for another system",
}


class NotReady(Exception):
    """The command cannot be executed as asked; the text says why and what to do."""


def enter(cwd: str, person: Person) -> None:
    """Go to the directory where a command starts, with the rights of this process.

    Raises:
        NotReady: It cannot be entered.
    """
    try:
        os.chdir(encode(cwd))
    except OSError as exc:
        raise NotReady("working directory {}: {}; {}".format(cwd, exc.strerror, _way_in(cwd, person, exc))) from exc


def _way_in(cwd: str, person: Person, exc: OSError) -> str:
    """Return what helps where a directory cannot be entered: a home, a copy below it by --sync, or a clone of --git."""
    home = os.path.normpath(person.home)
    is_home, is_copy = os.path.normpath(cwd) == home, os.path.normpath(cwd).startswith(home.rstrip("/") + "/")
    if exc.errno == errno.EACCES:
        where = "`namei -l {}` on this worker shows what {} may not enter".format(cwd, person.name)
        if is_home or is_copy:
            return where
        return where + "; change the owner, group or mode of the project, or run as its owner with --user"
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        if is_home:
            text = "this home of {} is missing on this worker: mount what it is on, or `tpu_ops configure` the worker"
            return text.format(person.name)
        return "it has gone meanwhile: start again, with {}".format("--sync DIR" if is_copy else "--git")
    return "`findmnt -T {}` and `dmesg` on this worker show what its file system lacks".format(cwd)


def find_program(name: bytes, path: bytes) -> bytes:
    """Return what an argument vector's first word names, with the rights of this process.

    Raises:
        NotReady: There is no such file, or it cannot be executed.
    """
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
    """Return what somebody may do who has named a program that is not on PATH, in words that follow the problem.

    Args:
        name: What they named.
        path: Where it was looked for.
        there: What is there of this name, and cannot be executed; empty where nothing is.
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
    return "; install it on this worker, name it by its whole path, or name the environment it is in with --venv"


def _hint(name: bytes) -> str:
    """Return what somebody may have meant by the name of a program that is none, in words that follow the problem."""
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
    """Return where a path is one of a program that can be executed, as far as that can be seen before.

    Args:
        path: The path.
        hint: What its name lets suppose.

    Raises:
        NotReady: It is none.
    """
    shown = os.fsdecode(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as exc:
        if os.path.islink(path):
            target = os.fsdecode(os.readlink(path))
            fix = "; install what it leads to, or name another program" if path.startswith(b"/") else _COPY
            raise NotReady("{} is a link to {}, which is not there{}".format(shown, target, fix)) from exc
        here = "on this worker" if path.startswith(b"/") else "in {}".format(os.getcwd())
        raise NotReady("there is no {} {}{}".format(shown, here, hint if "--shell" in hint else _COPY)) from exc
    except OSError as exc:
        fix = "`namei -l {}` on this worker shows on the way to it what this user may not enter".format(shown)
        raise NotReady("{} cannot be looked at: {}; {}".format(shown, exc.strerror, fix)) from exc
    if stat.S_ISDIR(mode):
        raise NotReady("{} is not an executable file but a directory; name a program in it".format(shown))
    if not stat.S_ISREG(mode):
        raise NotReady("{} is not an executable file{}".format(shown, hint or "; name a program"))
    if not os.access(path, os.X_OK):
        raise NotReady("{} is not an executable file{}".format(shown, hint or _executable(path, mode)))
    if why := _without_interpreter(path):
        raise NotReady("{} cannot be executed: {}".format(shown, why))


def _executable(path: bytes, mode: int) -> str:
    """Return what makes a file executable that this process may not execute, in words that follow the problem."""
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        return "; its file system is mounted with noexec: keep the program on another one"
    if mode & 0o111:
        return "; it is for others alone: change its owner, group or mode"
    return "; `chmod +x` makes it one (--sync copies that too)"


def _without_interpreter(path: bytes) -> str:
    """Return why a script has nothing that runs it; empty where it has, or is none, or is not this user's to read."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = _INTERPRETER.match(file.read(_FIRST_LINE))
    except OSError:
        return ""
    if not found or os.path.exists(found.group(1)):
        return ""
    name = os.fsdecode(found.group(1))
    if name.endswith("\r"):
        return "its lines end as those of Windows do, and so its first one names no program; dos2unix mends that"
    return "its first line names {}, which is not on this worker; install it, or name another one there".format(name)


def not_executed(name: str, exc: OSError) -> str:
    """Return why the kernel did not execute a program, given by its name, and what to do."""
    return "{}: {}{}".format(name, exc.strerror or exc, _NOT_EXECUTED.get(exc.errno or 0, ""))
