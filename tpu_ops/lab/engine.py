"""The container engine's command line: finding an engine, and calling it.

Docker and Podman are called by their command lines; the flags used here are the same for both. A rootless Podman is not
supported: workers need fixed addresses that the controller can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tpu_ops.errors import OpsError, UsageError

#: Tried in this order; sudo is for a daemon that only root may use.
CANDIDATES = (("docker",), ("podman",), ("sudo", "-n", "docker"), ("sudo", "-n", "podman"))
_FIX = "run `make demo`, or `tools/setup.sh engine`, which installs and starts one; or start yours"


class EngineError(OpsError):
    """A command of the container engine failed or took too long."""


@dataclass(frozen=True)
class Result:
    """The result of an engine's command: exit code and both outputs."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Engine:
    """One container engine.

    Attributes:
        command: The first words of every call, for example ``("sudo", "-n", "docker")``.
    """

    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """``docker`` or ``podman``."""
        return PurePath(self.command[-1]).name

    @property
    def is_podman(self) -> bool:
        """Whether this is Podman."""
        return self.name == "podman"

    async def run(self, *args: str, timeout: float = 120, check: bool = True) -> Result:  # noqa: ASYNC109 - the deadline of one process
        """Run one command without blocking the event loop.

        Args:
            args: The arguments after the engine's name.
            timeout: Seconds after which the command is ended.
            check: Whether a non-zero exit code raises an error.

        Raises:
            EngineError: The command failed (with `check`) or timed out.
        """
        process = await asyncio.create_subprocess_exec(
            *self.command,
            *args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            raise _too_long(self, args, timeout) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        result = Result(process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        return _checked(self, args, result) if check else result

    def call(self, *args: str, timeout: float = 120, check: bool = True) -> Result:
        """Run one command and wait for it, as `run` does, outside of an event loop."""
        try:
            done = subprocess.run(
                [*self.command, *args], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise _too_long(self, args, timeout) from None
        result = Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        return _checked(self, args, result) if check else result


def _shown(engine: Engine, args: Sequence[str]) -> str:
    """Return the first words of a command, for messages."""
    return " ".join([engine.name, *args[:2]])


def _too_long(engine: Engine, args: Sequence[str], timeout: float) -> EngineError:
    return EngineError(
        f"`{_shown(engine, args)}` did not end within {timeout:.0f} s",
        fix="look at the engine's own log, then try again",
    )


def _checked(engine: Engine, args: Sequence[str], result: Result) -> Result:
    if result.code:
        raise EngineError(f"`{_shown(engine, args)}` failed: {reason(result.stderr) or f'exit code {result.code}'}")
    return result


def reason(text: str) -> str:
    """Return the line of an engine's error output that has the reason, or the empty string.

    Docker's client prints a last line that only repeats the container's name; the daemon's answer comes before it.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    daemon = [line for line in lines if "response from daemon" in line]
    return (daemon or lines or [""])[-1]


def find(environ: Mapping[str, str] = os.environ) -> Engine:
    """Return the engine that TPU_OPS_ENGINE names, else the first one that answers.

    Raises:
        UsageError: No engine answers; the error has the reason for each.
    """
    named = environ.get("TPU_OPS_ENGINE", "")
    candidates = [tuple(words) for words in CANDIDATES if not named or words[-1] == named]
    if named and not candidates:
        candidates = [tuple(named.split())]
    reasons = []
    for command in candidates:
        reason = _refusal(Engine(command))
        if reason is None:
            return Engine(command)
        reasons.append(f"{' '.join(command)}: {reason}")
    raise UsageError(
        f"{named or 'no container engine'} does not answer" if named else "no container engine answers",
        where="TPU_OPS_ENGINE" if named else "",
        fix=f"{_FIX} ({'; '.join(reasons)})",
    )


def _refusal(engine: Engine) -> str | None:
    """Return why this engine cannot be used, or None if it can."""
    template = "{{.Host.Security.Rootless}}" if engine.is_podman else "{{.ServerVersion}}"
    try:
        answer = engine.call("info", "--format", template, timeout=20, check=False)
    except FileNotFoundError:
        return "not installed"
    except OSError as exc:
        return str(exc)
    except EngineError as exc:
        return exc.what
    if answer.code or not answer.stdout.strip():
        return reason(answer.stderr) or f"exit code {answer.code}"
    if engine.is_podman and answer.stdout.strip() == "true":
        return "rootless, so the controller could not reach its workers' addresses"
    return None
