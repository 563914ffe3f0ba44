"""Find a container engine, Docker or Podman, and call its command line.

The flags that are used here are the same for Docker and Podman. A rootless Podman is not supported: workers need fixed
addresses that the controller can reach.
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

#: Command lines of container engines, tried in this order; sudo is for an engine that only root can use.
CANDIDATES = (("docker",), ("podman",), ("sudo", "-n", "docker"), ("sudo", "-n", "podman"))
_FIX = "run `make demo`, or install and start an engine with `tools/setup.sh engine`, or start your own engine"


class EngineError(OpsError):
    """A command of the container engine failed or took too long."""


@dataclass(frozen=True)
class Result:
    """The result of an engine's command: exit code, standard output and standard error."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Engine:
    """A container engine with its command line.

    Attributes:
        command: The first words of every call, for example ``("sudo", "-n", "docker")``.
    """

    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """The engine's name, ``docker`` or ``podman``."""
        return PurePath(self.command[-1]).name

    @property
    def is_podman(self) -> bool:
        """Whether the engine is Podman."""
        return self.name == "podman"

    async def run(self, *args: str, timeout: float = 120, check: bool = True) -> Result:  # noqa: ASYNC109 - the deadline of one process
        """Run one command of the engine without blocking the event loop.

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
        """Run one command of the engine like `run`, but without an event loop."""
        try:
            done = subprocess.run(
                [*self.command, *args], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise _too_long(self, args, timeout) from None
        result = Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        return _checked(self, args, result) if check else result


def _shown(engine: Engine, args: Sequence[str]) -> str:
    """Return the first words of an engine's command, for messages."""
    return " ".join([engine.name, *args[:2]])


def _too_long(engine: Engine, args: Sequence[str], timeout: float) -> EngineError:
    return EngineError(
        f"`{_shown(engine, args)}` did not end within {timeout:.0f} s",
        fix="look at the container engine's log, then try again",
    )


def _checked(engine: Engine, args: Sequence[str], result: Result) -> Result:
    if result.code:
        raise EngineError(f"`{_shown(engine, args)}` failed: {reason(result.stderr) or f'exit code {result.code}'}")
    return result


def reason(text: str) -> str:
    """Return the line of an engine's error output that says why a command failed; empty if there is no such line.

    The last line of Docker's client only repeats the container's name; the daemon's reason is in an earlier line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    daemon = [line for line in lines if "response from daemon" in line]
    return (daemon or lines or [""])[-1]


def find(environ: Mapping[str, str] = os.environ) -> Engine:
    """Return the engine that TPU_OPS_ENGINE names; if this variable is not set, the first engine that answers.

    Raises:
        UsageError: No engine answers; the error has the reason for each engine.
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
    """Return the reason why an engine cannot be used, or None if it can be used."""
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
        return "rootless, so the controller could not reach the workers' addresses"
    return None
