"""The specification of a run. It is validated once, and is the same for every rank except for the rank's own facts."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from tpu_ops.cloud.node import Worker
from tpu_ops.errors import UsageError
from tpu_ops.protocol.spec import (
    ENV_NAME,
    MAX_SECRET,
    MEGASCALE,
    RANK_VARIABLES,
    REASON_FILE,
    RUN_DIR,
    STALL_TIMES,
    TIMES,
    is_run_id,
)

#: Seconds between SIGTERM and SIGKILL after a failure, and at a stop by a user. After a failure, the other ranks hang
#: in a collective operation, so a long grace is useless. At a stop, ranks have time to write a checkpoint.
GRACE_FAILURE = 10.0
GRACE_STOP = 30.0
#: Seconds for all workers to become ready for a start, including cold connections and busy hosts.
BARRIER = 60.0
#: Seconds without a sign of life after which the other workers give a worker up.
LEASE = 15.0
#: Seconds for which other ranks can continue after one rank has ended with 0. jax.distributed waits for the last rank
#: for the same time.
EXIT_SKEW = 300.0

#: Maximum bytes of one argument or variable, including the NUL byte at its end (Linux's limit), and of all together.
#: Linux's limit for all together is 2 MiB, which also has to hold the other variables of the ranks.
_LONGEST_WORD, _LONGEST_WORDS = 128 * 1024, 1024 * 1024
_HOW = "write NAME, a variable that this shell exports, or NAME=FILE; a secret does not belong on a command line"
#: Variables by which the processes of a run find each other. If they are set, JAX uses them and does not find the
#: values itself.
RENDEZVOUS = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_ADDRESSES",
    *MEGASCALE,
    "MASTER_ADDR",
)
_FOUND = "leave the variable out: JAX finds its processes by itself, and TPU_OPS_* variables tell each rank its place"
_VARIABLE = "write KEY=VALUE, the key in letters, digits and underscores, no digit first"


@dataclass(frozen=True)
class RunSpec:
    """The specification of one training run.

    Attributes:
        run_id: The name of the run on every worker.
        argv: The command; it is executed without a shell.
        env: Variables that the user set.
        secrets: Secret variables for the command. Their values are neither shown nor stored anywhere.
        user: The user that the command runs as; empty means the user who starts the run.
        cwd: The working directory: absolute, or below the user's home; empty means the home.
        venv: Absolute path of the virtual environment; empty means the workers' configured one.
        attempt: 1 for the first start; each recovery adds one.
        grace_failure: Seconds between SIGTERM and SIGKILL after another rank's failure.
        grace_stop: Seconds between SIGTERM and SIGKILL when a user stops the run.
        barrier: Seconds for all workers to become ready.
        lease: Seconds without a sign of life after which the other workers give a worker up.
        exit_skew: Seconds for which other ranks can continue after one rank has ended with 0.
        code_digest: Digest of the synced tree, or the commit that was checked out; empty if neither.
        stall: ``after``, ``grace`` and ``on`` of `protocol.spec.stall_of`; None means the defaults.
        force: Whether the workers ignore those faults that `--force` overrides.
        key: The secret by which the run's supervisors authenticate each other. Only the supervisors receive it.
    """

    run_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    user: str = ""
    cwd: str = ""
    venv: str = ""
    attempt: int = 1
    grace_failure: float = GRACE_FAILURE
    grace_stop: float = GRACE_STOP
    barrier: float = BARRIER
    lease: float = LEASE
    exit_skew: float = EXIT_SKEW
    code_digest: str = ""
    force: bool = False
    stall: Mapping[str, Any] | None = None
    # The module `secrets` would create the key as well, but its import loads OpenSSL.
    key: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check those values of the spec that come from a user."""
        if not is_run_id(self.run_id):
            raise UsageError(
                f"{self.run_id!r} is not a name for a run",
                where="--name",
                fix="use at most 79 lower-case letters, digits, dots, dashes; a letter or digit first, no .json last",
            )
        if not self.argv or not self.argv[0]:
            raise UsageError("no command given", fix="write the command after `--`, as in: -- python train.py")
        for name, (least, most) in TIMES.items():
            if not least <= (seconds := getattr(self, name)) <= most:
                option = "--" + name.replace("_", "-")
                raise UsageError(
                    f"{seconds:g} seconds are too {'few' if seconds < least else 'many'}",
                    where=option,
                    fix=f"give {least} to {most} seconds",
                )
        _check_stall(self.stall or {})
        # A relative path would mean different directories: preflight starts in the home, the supervisor in /.
        if self.venv and not self.venv.startswith("/"):
            fix = "write the absolute path of the environment on the workers, as in /home/ada/env"
            raise UsageError(f"{self.venv!r} is not an absolute path", where="--venv", fix=fix)
        for option, names in (("--env", self.env), ("--secret", self.secrets)):
            if own := next((name for name in names if name in (*RANK_VARIABLES, RUN_DIR, REASON_FILE)), ""):
                what = f"{own} tells each rank its place, and is set by the launcher itself"
                raise UsageError(what, where=option, fix="choose another name")
        for name in self.secrets:
            if twice := {name, f"{name}_FILE"} & {*self.env, *(self.secrets.keys() - {name})}:
                what = f"the secret sets {name} and {name}_FILE, and {twice.pop()} is set already"
                raise UsageError(what, where=f"--secret {name}", fix="leave out one of the two")
        self._check_lengths()
        for name, value in self.env.items():
            if not ENV_NAME.fullmatch(name):
                raise UsageError(f"{name!r} is not a name of an environment variable", where="--env", fix=_VARIABLE)
            if "\0" in value:
                raise UsageError(f"the value of {name} contains a NUL byte", where="--env", fix="leave it out")

    def _check_lengths(self) -> None:
        """Reject arguments and variables that are too long for Linux; the error shows no value of a variable."""
        words = {f"argument {number}": word for number, word in enumerate(self.argv)}
        words |= {f"variable {name}": f"{name}={value}" for name, value in self.env.items()}
        sizes = {where: len(os.fsencode(word)) + 1 for where, word in words.items()}
        fix = "put the text into a file that is copied with the code (--sync)"
        if long := next((where for where, size in sizes.items() if size > _LONGEST_WORD), ""):
            raise UsageError(f"longer than {_LONGEST_WORD // 1024} KiB, the limit of Linux", where=long, fix=fix)
        if sum(sizes.values()) > _LONGEST_WORDS:
            what = f"together longer than {_LONGEST_WORDS // 1024} KiB"
            raise UsageError(what, where="arguments and variables", fix=fix)

    def for_rank(self, workers: Sequence[Worker], rank: int, port: int = 0) -> dict[str, Any]:
        """Return the spec that the launcher of one worker receives.

        Args:
            workers: All workers, by rank.
            rank: The rank of this worker.
            port: The port of rank 0's supervisor; 0 for rank 0 itself.
        """
        worker = workers[rank]
        slices = list(dict.fromkeys(other.node.full_name for other in workers))
        net = {"address": worker.internal_ip, "hub": workers[0].internal_ip, "port": port, "key": self.key}
        # Launchers of older versions accept specs without this key only.
        stall = {} if self.stall is None else {"stall": dict(self.stall)}
        return {
            **stall,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "rank": rank,
            "world_size": len(workers),
            "node": worker.label,
            "slice": slices.index(worker.node.full_name),
            "slices": len(slices),
            "worker": worker.host,
            "workers": [other.host for other in workers],
            "argv": list(self.argv),
            "env": {**_without_others(worker, len(slices)), **self.env},
            "secrets": dict(self.secrets),
            "user": self.user,
            "cwd": self.cwd,
            "venv": self.venv,
            "grace_failure": self.grace_failure,
            "grace_stop": self.grace_stop,
            "barrier": self.barrier,
            "lease": self.lease,
            "exit_skew": self.exit_skew,
            "net": net if len(workers) > 1 else None,
            "chips": worker.node.chips_per_worker,
            "force": self.force,
            "code_digest": self.code_digest,
            "started_from": here(),
        }


def _check_stall(stall: Mapping[str, Any]) -> None:
    """Check the times after which a run counts as standing still."""
    for name, (least, most) in STALL_TIMES.items():
        if not least <= stall.get(name, least) <= most:
            fix = f"give at most {most // 86400} days"
            raise UsageError(f"{stall[name]:g} seconds are too many", where=f"--stall-{name}", fix=fix)


def _without_others(worker: Worker, slices: int) -> dict[str, str]:
    """Return the variables that a run on one slice of a multislice needs, so that it does not wait for other slices.

    If a variable is not set, JAX asks the metadata server, which lists all slices of the multislice. An empty value
    means that there are no other slices (`get_tpu_env_value` in JAX's cloud_tpu_cluster.py, JAX 0.6.1 to 0.10.2). In
    older versions of JAX neither works: they parse an empty value as a number, and look up a variable that is not set.
    """
    return dict.fromkeys(MEGASCALE, "") if worker.node.multislice and slices == 1 else {}


def here() -> str:
    """Return the user's login name and the name of this machine, as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def new_run_id(word: str, now: datetime | None = None, token: str | None = None) -> str:
    """Return a run id made of a word and the time, as in ``digits-20261120-181500-ab12``.

    Args:
        word: The subject of the run; characters that a run id cannot contain become dashes.
        now: The time; default: now, in UTC.
        token: Four characters that distinguish runs of the same second; default: random.
    """
    name = re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")[:40] or "run"
    time = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    return f"{name}-{time}-{token or os.urandom(2).hex()}"


def name_of(argv: Sequence[str], synced: str = "") -> str:
    """Return the word that names a run: the synced directory, else the script, else the program."""
    if synced:
        return synced
    script = next((word for word in argv[1:] if word.endswith(".py")), argv[0] if argv else "run")
    return PurePath(script).name.removesuffix(".py")


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE words into variables.

    Raises:
        UsageError: A word has another form.
    """
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not ENV_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not of the form KEY=VALUE", where="--env", fix=_VARIABLE)
        found[name] = value
    return found


def read_secrets(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets for NAME and NAME=FILE words: an exported variable's value, or the content of a file.

    The last line end of a file is removed: most editors and `echo` add one.

    Raises:
        UsageError: A word has another form, or the variable or file does not exist. The message contains no value, and
            nothing that follows the equals sign: the user might have written the secret there.
    """
    found = {}
    for word in words:
        name, sign, path = word.partition("=")
        if not ENV_NAME.fullmatch(name):
            raise UsageError("not of the form NAME or NAME=FILE", where="--secret", fix=_HOW)
        if name in found:
            raise UsageError("this secret is named twice", where=f"--secret {name}", fix="leave out one of the two")
        try:
            value = _text_of(Path(path).expanduser()) if sign else environ.get(name, "")
        except (OSError, RuntimeError) as exc:
            why = getattr(exc, "strerror", "") or "there is no such home directory"
            raise UsageError(f"cannot read the file after `=`: {why}", where=f"--secret {name}", fix=_HOW) from None
        if not value:
            what = "the file after `=` is empty" if sign else f"the variable {name} is not set here, or is empty"
            raise UsageError(what, where=f"--secret {name}", fix=_HOW if sign else f"export {name}, or {_HOW}")
        if "\0" in value or len(os.fsencode(value)) > MAX_SECRET:
            what = f"the value contains a NUL byte, or is longer than {MAX_SECRET // 1024} KiB"
            raise UsageError(what, where=f"--secret {name}", fix="put the value on the workers as a file")
        found[name] = value
    return found


def _text_of(path: Path) -> str:
    return os.fsdecode(path.read_bytes()).removesuffix("\n").removesuffix("\r")


def variables(named: Mapping[str, str], files: Iterable[Path], *, again: bool = False) -> dict[str, str]:
    """Return the variables of a run, from files of variables and from `--env`, which overrides the files.

    Args:
        named: The variables that are given by `--env`.
        files: The files with variables (see `read_env_file`). A later file overrides an earlier file.
        again: Whether a recovery might start the run again with these variables, on other hosts.

    Raises:
        UsageError: A file cannot be read, or a variable of `RENDEZVOUS` would be used for several attempts.
    """
    found: dict[str, str] = {}
    for where, some in [*((f"--env-file {path}", read_env_file(path)) for path in files), ("--env", named)]:
        # Only a value that names hosts becomes stale: an empty variable is valid for every attempt.
        if stale := next((name for name in RENDEZVOUS if again and some.get(name)), ""):
            what = f"{stale} is for one attempt only: a later one (--recover) would look for hosts that are gone"
            fix = f"{_FOUND}; if the value stays valid, set it in the command, as in: -- env {stale}=... COMMAND"
            raise UsageError(what, where=where, fix=fix)
        found |= some
    return found


def read_env_file(path: Path) -> dict[str, str]:
    """Parse a file of KEY=VALUE lines, comments and empty lines. Quotes and escapes in values have no meaning.

    Raises:
        UsageError: The file cannot be read, or a line has another form; the message contains no value.
    """
    try:
        # Remove a byte order mark, which some editors write.
        text = path.read_bytes().decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    except OSError as exc:
        fix = "name a file that you can read"
        raise UsageError(f"cannot read the file: {exc.strerror}", where=f"--env-file {path}", fix=fix) from exc
    found = {}
    # Not `splitlines`, which would also split at a form feed and other characters that a value can contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, value = line.removesuffix("\r").partition("=")
        if not sign or not ENV_NAME.fullmatch(name.strip()):
            where = f"--env-file {path}, line {number}"
            raise UsageError("not of the form KEY=VALUE", where=where, fix=_VARIABLE)
        if "\0" in value:
            where = f"--env-file {path}, line {number}"
            raise UsageError(f"the value of {name.strip()} contains a NUL byte", where=where, fix="leave it out")
        found[name.strip()] = value
    return found
