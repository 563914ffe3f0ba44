"""Run git and uv without prompts, with time limits and retries; supports Python 3.8."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import tempfile
import time
from typing import IO

from ansible.module_utils.as_person import PersonFault
from ansible.module_utils.environment_sets import shortened

#: Environment variables that stop git, ssh and uv from prompting and from printing progress.
ENVIRONMENT = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=20",
    "GIT_OPTIONAL_LOCKS": "0",
    "GCM_INTERACTIVE": "never",
    "UV_NO_PROGRESS": "1",
    "NO_COLOR": "1",
}


#: Bytes of a script's output that are read if it fails.
OUTPUT = 4000
#: Parts of git's messages if a server accepts no more connections at present. If many workers connect at once, sshd
#: rejects some connections before authentication (MaxStartups in sshd_config(5)); https servers answer 429 or 503.
TURNED_AWAY = re.compile(r"ssh_exchange_identification|kex_exchange_identification|returned error: (429|503)")
#: Seconds during which a command is retried while the server is busy, and the longest pause between two attempts.
PATIENCE, PAUSE = 60.0, 5.0


def program(
    command: list[str],
    timeout: int,
    *,
    errors_too: bool = False,
    output: IO[bytes] | None = None,
) -> str:
    """Run a program and return its output.

    Args:
        command: The program and its arguments.
        timeout: The time limit in seconds.
        errors_too: Whether to include stderr in the result.
        output: A file to which the output is written as bytes; the result is then empty.

    Raises:
        PersonFault: The program is missing, fails or takes too long; the message ends with its last output.
    """
    shown = " ".join(command[:1] + [word for word in command[1:] if not word.startswith("-")][:4])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            env=dict(os.environ, **ENVIRONMENT),
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PersonFault(
            "%s did not end within %d s; check what it is waiting for, or increase workspace_timeout" % (shown, timeout)
        ) from None
    except OSError as exc:
        raise PersonFault("%s does not run: %s" % (command[0], exc.strerror)) from None
    if done.returncode:
        words = shortened(done.stderr or done.stdout or "")
        raise PersonFault("%s exited with %d: %s" % (shown, done.returncode, words))
    return done.stdout or ""


def script(path: str, timeout: int, directory: str) -> None:
    """Run a person's script in a directory until it ends; processes that it leaves in the background are not awaited.

    Raises:
        PersonFault: The script does not run, fails or takes too long; the message ends with its last output.
    """
    # A file, since processes in the background would keep a pipe open.
    with tempfile.TemporaryFile() as stream:
        try:
            process = subprocess.Popen(
                [path],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(os.environ, **ENVIRONMENT),
                cwd=directory,
                start_new_session=True,
            )
        except OSError as exc:
            raise PersonFault("%s does not run: %s" % (path, exc.strerror)) from None
        try:
            what = "exited with %d" % process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            what = "did not end within %d s (workspace_timeout) and was ended" % timeout
        if process.returncode:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - OUTPUT))
            words = shortened(stream.read(OUTPUT).decode("utf-8", "replace"))
            raise PersonFault("%s %s; its last output: %s" % (path, what, words or "none"))


def at_remote(command: list[str], timeout: int) -> str:
    """Run a command that contacts a remote, and return its output; retry while the server is busy.

    Args:
        command: The program and its arguments.
        timeout: The time limit for each attempt in seconds.

    Raises:
        PersonFault: See `program`.
    """
    until = time.monotonic() + PATIENCE
    while True:
        pause = random.uniform(PAUSE / 5, PAUSE)  # noqa: S311
        try:
            return program(command, timeout)
        except PersonFault as exc:
            if not TURNED_AWAY.search(str(exc)) or time.monotonic() + pause > until:
                raise
        time.sleep(pause)  # a random pause, so that workers that were rejected together do not retry together


class Git:
    """The program git, run in one directory."""

    def __init__(self, path: str, timeout: int) -> None:
        self.path = path
        self.timeout = timeout

    def __call__(self, *arguments: str) -> str:
        """Run git and return its output.

        Raises:
            PersonFault: git fails.
        """
        return program(["git", "-C", self.path, *arguments], self.timeout)

    def remote(self, *arguments: str) -> str:
        """Run a git command that contacts the remote, and return its output; retry while the server is busy.

        Raises:
            PersonFault: git fails.
        """
        return at_remote(["git", "-C", self.path, *arguments], self.timeout)

    def content(self, commit: str, name: str) -> bytes:
        """Return a file of a commit with the content that a checkout would write, after the filters of gitattributes.

        Raises:
            PersonFault: git fails.
        """
        command = ["git", "-C", self.path, "cat-file", "--filters", "%s:%s" % (commit, name)]
        with tempfile.TemporaryFile() as stream:
            program(command, self.timeout, output=stream)
            stream.seek(0)
            return stream.read()

    def differing(self, commit: str) -> set[str]:
        """Return the paths of a commit's files that are missing in the working tree or differ there.

        A temporary index is used, so that files whose changes a user told git to ignore are compared too.

        Raises:
            PersonFault: git fails.
        """
        with tempfile.TemporaryDirectory() as directory:
            git = ["env", "GIT_INDEX_FILE=%s" % os.path.join(directory, "index"), "git", "-C", self.path]
            program([*git, "read-tree", commit], self.timeout)
            names = program([*git, "diff", "--name-only", "--no-renames", "-z"], self.timeout)
        return set(names.split("\0")) - {""}

    def has(self, *arguments: str) -> bool:
        """Return whether a git command succeeds."""
        try:
            self(*arguments)
        except PersonFault:
            return False
        return True


def keep_safe(paths: list[str], gone: list[str], system: str, timeout: int, *, check: bool) -> list[str]:
    """Allow all users to use root's clones with git, and remove deleted clones from this list; return the changes.

    git refuses another user's clone unless safe.directory names it (git-config(1)). Only root's clones are named, since
    the owner of a clone decides which programs git runs in it.
    """
    try:
        known = program(["git", "config", "--file", system, "--get-all", "safe.directory"], timeout).splitlines()
    except PersonFault:
        known = []
    added = [path for path in paths if path not in known]
    removed = [path for path in gone if path in known]
    for path in added if not check else []:
        program(["git", "config", "--file", system, "--add", "safe.directory", path], timeout)
    for path in removed if not check else []:
        program(["git", "config", "--file", system, "--unset-all", "safe.directory", "^%s$" % re.escape(path)], timeout)
    return ["let everybody use git in %s" % path for path in added] + [
        "forget %s in %s" % (path, system) for path in removed
    ]
