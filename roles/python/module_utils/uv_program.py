"""The program uv with its cache, its time limit and its messages; runs on Python 3.8."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import time
from typing import TextIO
from urllib.parse import urlsplit

from ansible.module_utils.environment_sets import shortened

#: A line of uv's report: a package that uv adds, removes or reinstalls.
PLAN = re.compile(r"^ ([+~-]) (\S+)", re.MULTILINE)

#: uv's message if the package index lacks a version, or if its cached page is older than that version.
NO_VERSION = re.compile(r"there is no version of\s+([\w.-]+)===?")

#: uv's message if the package index lacks a package.
NO_PACKAGE = re.compile(r"([\w.-]+) was\s+not\s+found\s+in\s+the\s+package\s+registry")


class Fault(Exception):
    """The work on an environment failed; the text is the message for the user."""


def plan_lines(report: str) -> list[str]:
    """Given uv's output on stderr, return one line for each package that uv changes or would change."""
    found = PLAN.findall(report)
    # A dry run reports a reinstalled package with - and + instead of ~.
    again = {name for sign, name in found if sign == "-"} & {name for sign, name in found if sign == "+"}
    signs = [("~" if name in again else sign, name) for sign, name in found]
    return ["%s %s" % pair for pair in dict.fromkeys(signs)]


def device(path: str) -> int:
    """Return the device number of the file system that holds a path or would hold it."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def listens(url: str) -> bool:
    """Return whether the server of a URL accepts connections, or begins to do so within three seconds."""
    place, deadline = urlsplit(url), time.monotonic() + 3
    while True:
        with contextlib.suppress(OSError), socket.create_connection((place.hostname or "", place.port or 80), 3):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)  # polls the server until the deadline


class Uv:
    """The program uv, with its cache, its time limit, and the URL of the slice's index; empty if there is none."""

    def __init__(self, program: str, cache: str, timeout: int, slice_index: str = "") -> None:
        self.program = program
        self.cache = os.path.expanduser(cache)
        self.timeout = timeout
        self.slice_index = slice_index

    def run_sharing(self, *arguments: str, place: str = "/") -> tuple[tuple[str, str], str]:
        """Run uv with the slice's index, and without it if that fails.

        uv must verify all that it downloads, since the index is plain HTTP on another worker.

        Returns:
            What `run` returns, and why the slice's index was not used; empty if it was used or there is none.
        """
        missed = ""
        if self.slice_index and not listens(self.slice_index):
            missed = "%s does not answer" % self.slice_index
        elif self.slice_index:
            environ = {
                "UV_DEFAULT_INDEX": "%s/simple" % self.slice_index,
                "UV_PYTHON_INSTALL_MIRROR": "%s/python" % self.slice_index,
                "NO_PROXY": str(urlsplit(self.slice_index).hostname),
                "UV_HTTP_RETRIES": "1",
                "UV_HTTP_TIMEOUT": "30",
                # The build of a package would install others from the index, whose hashes no lock has.
                "UV_NO_BUILD": "1",
            }
            try:
                return self.run_once(*arguments, place=place, environ=environ), ""
            except Fault as exc:
                missed = str(exc)
        return self.run(*arguments, place=place), missed

    def run(self, *arguments: str, place: str = "/") -> tuple[str, str]:
        """Run uv and return what it wrote to stdout and stderr.

        Each worker caches the pages of the package index for ten minutes, so a version that one worker has found can be
        missing in another worker's cache. If a requested version is missing, the package's page is fetched again.

        Args:
            arguments: Arguments of uv.
            place: The directory into which uv installs; files are links to the cache if both are on one file system.

        Raises:
            Fault: uv failed; the text includes its message.
        """
        anew: list[str] = []
        while True:
            try:
                return self.run_once(*arguments[:2], *anew, *arguments[2:], place=place)
            except Fault as exc:
                stale = ["--refresh-package=%s" % name for name in NO_VERSION.findall(str(exc))]
                if not set(stale) - set(anew):
                    raise
                anew += [option for option in dict.fromkeys(stale) if option not in anew]

    def run_once(self, *arguments: str, place: str, environ: dict[str, str] | None = None) -> tuple[str, str]:
        """Run uv once; see `run`."""
        environ = dict(os.environ, UV_CACHE_DIR=self.cache, UV_NO_PROGRESS="1", NO_COLOR="1", **(environ or {}))
        if device(self.cache) != device(place):
            environ["UV_LINK_MODE"] = "copy"
        command = [self.program, *arguments]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                env=environ,
                timeout=self.timeout,
                check=False,
            )
        except OSError as exc:
            raise Fault("%s does not run (%s); the role python installs it" % (self.program, exc)) from exc
        except subprocess.TimeoutExpired as exc:
            raise Fault("%s did not end within %d s" % (" ".join(command), self.timeout)) from exc
        if done.returncode:
            raise Fault("%s ended with %d: %s" % (" ".join(command), done.returncode, shortened(done.stderr)))
        return done.stdout, done.stderr

    def take_turn(self) -> TextIO:
        """Wait for the lock on the cache, which other installations use; close the returned file to free it."""
        os.makedirs(self.cache, mode=0o755, exist_ok=True)
        lock = open(os.path.join(self.cache, ".tpu_ops.lock"), "a")  # noqa: SIM115 - kept open, it is the lock
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.close()
                    raise Fault(
                        "another installation has held the lock %s for %d s; wait until that ends, or end it, and run"
                        " again" % (lock.name, self.timeout)
                    ) from None
                time.sleep(0.2)  # polls the lock until the deadline
            else:
                return lock
