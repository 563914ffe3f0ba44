"""`tpu_ops run`: run a command on all workers of a target at the same time; equal output is shown once."""

from __future__ import annotations

import argparse
import base64
import os
import re
import shlex
from collections.abc import Sequence

from tpu_ops import config, texts
from tpu_ops.cli import options, output
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact
from tpu_ops.protocol import wire
from tpu_ops.runs import preparations
from tpu_ops.ssh import envelope, openssh
from tpu_ops.ssh.replies import LATE, LONGEST, MUTE, Result

#: Default of --timeout: seconds that the command may take on each worker.
TIMEOUT = 300.0
#: First line of standard error if the shell that starts the command (dash or bash) could not start it.
_NOT_STARTED = re.compile(
    rb"(?ms)\A" + envelope.SHELL_SAYS + rb"(?:line )?1: exec: (.*?): (?:cannot execute: )?"
    rb"(not found|No such file or directory|Permission denied)$"
)
#: Characters and words that only a shell understands, and the advice for a command that contains them.
_OF_A_SHELL = re.compile(rb"[\s;|&<>$*~=]|^(cd|export|source|\.|set|unset|ulimit|umask|alias|eval|exec)$")
_HINT = b"; for a shell line: --shell -- 'LINE'"
#: Maximum length in bytes of the command line on a worker: Linux limits one argument of a shell to 128 KiB.
_LONGEST = 128 * 1024 - 64

#: Tells the dispatcher that the words after `--` are a command.
TAKES_COMMAND = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops run`."""
    options.add_fleet(parser)
    options.add_json(parser)
    options.add_exit_code(parser, "the first worker where the command failed")
    parser.add_argument(
        "--timeout",
        type=options.seconds,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"limit for each worker, connecting included (default: {TIMEOUT:.0f})",
    )
    parser.add_argument("target", help="a node (pod), a worker (pod-w0), a node set (pod-w[0-1]) or a group (@all)")
    parser.add_argument(
        "--shell", action="store_true", help="run the command as one line of /bin/sh on every worker, its words joined"
    )
    parser.usage = "%(prog)s TARGET [OPTION...] -- COMMAND..."
    parser.epilog = (
        "The command and its arguments are passed on unchanged; for a shell line: --shell -- 'LINE'. The command gets "
        "no input, and its output is shown once it has ended on all workers. `python` and `pip` are your own "
        "environment's, or the fleet's; other programs of an environment need their full path."
    )


def run(args: argparse.Namespace) -> int:
    """Run the command on all workers and show what it printed."""
    command = words(args.command, f"tpu_ops run {shlex.quote(args.target)} -- hostname")
    if args.shell:
        command = ["/bin/sh", "-c", " ".join(command)]
    if (size := len(os.fsencode(envelope.enveloped(wire.new_marker(), command, args.timeout)))) > _LONGEST:
        what = f"the command is {size - _LONGEST} bytes longer than a worker accepts"
        raise UsageError(what, where="after `--`", fix="copy the long part as a file (`tpu_ops sync`)")
    fleet, workers = contact.find(config.load(args.fleet), args.target)
    fleet = contact.serving(fleet, workers)
    hosts = [worker.host for worker in workers]
    away = contact.out_of_reach(fleet, hosts)
    try:
        found = contact.run(fleet, [host for host in hosts if host not in away], command, args.timeout)
    except KeyboardInterrupt:
        output.info(
            f"interrupted: on workers that have started the command, it continues for {args.timeout:g} s at most"
        )
        return ExitCode.INTERRUPTED
    results = [found.get(host) or Result(host, None, problem=away[host], reached=False) for host in hosts]
    results = [one._replace(problem=output.on_fleet(one.problem)) for one in results]
    if args.json:
        with output.read_or_not():
            output.as_json([row(result) for result in results])
        if cut := [result.host for result in results if result.cut]:
            _say_cut(cut)
    else:
        show(results)
    if any(result.problem.startswith((LATE, MUTE)) for result in results):
        # This advice is printed once for all workers.
        stays = "; to leave something running, redirect its output: `... >/tmp/log 2>&1 &`"
        late = any(result.problem.startswith(LATE) for result in results)
        output.info(f"  fix: give the command more time with --timeout{stays if late else ''}")
    if refused := [one.problem for one in results if not one.reached and openssh.refused(one.problem)]:
        output.info(f"  fix: {contact.login_hint(fleet.settings, ' '.join(refused))}")
    if away:
        output.info(f"  fix: {preparations.way_back(fleet, away)}")
    return exit_code(results, of_rank=args.exit_code == "rank")


def words(command: Sequence[str], example: str) -> list[str]:
    """Return the command, given the words after `--`.

    Args:
        command: The words after `--`.
        example: A complete command line, for the error message.

    Raises:
        UsageError: There are no words after `--`, or the first word is empty.
    """
    if not command or not command[0]:
        raise UsageError("no command given", where="after `--`", fix=f"write the command there, as in: `{example}`")
    return list(command)


def row(result: Result) -> dict[str, object]:
    """Return a worker's result for --json; output that is not UTF-8 is also given as base64."""
    return {
        "host": result.host,
        "code": result.code,
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
        "stdout_base64": None if _is_text(result.stdout) else base64.b64encode(result.stdout).decode(),
        "stderr_base64": None if _is_text(result.stderr) else base64.b64encode(result.stderr).decode(),
        "problem": result.problem,
        "reached": result.reached,
        "cut": result.cut,
    }


def gathered(results: Sequence[Result]) -> list[tuple[list[str], Result]]:
    """Group workers with equal results; return the workers and the result of each group, the largest group first."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        key = (result.code, result.stdout, result.stderr, result.problem, result.reached, result.cut)
        groups.setdefault(key, []).append(result)
    ordered = sorted(groups.values(), key=lambda group: -len(group))
    return [([result.host for result in group], group[0]) for group in ordered]


def show(results: Sequence[Result]) -> None:
    """Print the output of workers: equal output once, and the output of a single worker byte by byte."""
    groups = gathered(results)
    for hosts, result in groups:
        _show(hosts, len(results), result)
    if len(results) > 1:
        _say_no_text(groups)


def _show(hosts: Sequence[str], total: int, result: Result) -> None:
    with output.read_or_not():
        if total > 1 or not result.ok:
            count = f" ({len(hosts)} workers)" if len(hosts) > 1 else ""
            ending = "" if result.ok else f": {result.problem or _ending(result.code or 0)}"
            output.line(f"--- {texts.folded(hosts)}{count}{ending}")
        if result.stdout:
            output.raw(result.stdout if total == 1 else _as_text(result.stdout))
    if said := said_by(result.stderr):
        output.raw(said if total == 1 else _as_text(said), aside=True)
    if result.cut:
        _say_cut(hosts)


def _is_text(data: bytes) -> bool:
    """Return whether bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _as_text(data: bytes) -> bytes:
    """Return the output of one of several workers for printing: as valid UTF-8 that ends with a newline."""
    return data.decode(errors="replace").removesuffix("\n").encode() + b"\n"


def _say_no_text(groups: Sequence[tuple[Sequence[str], Result]]) -> None:
    """Warn of output of several workers that is not UTF-8 and so was not shown byte by byte."""
    first = ""
    for hosts, result in groups:
        for name, data in (("standard output", result.stdout), ("standard error", result.stderr)):
            if not _is_text(data):
                first = first or hosts[0]
                each = " of each" if len(hosts) > 1 else ""
                what = f"the {name}{each}, {texts.count(len(data), 'byte')}, is not UTF-8; invalid bytes were replaced"
                output.warning(f"{texts.folded(hosts)}: {what}")
    if first:
        output.info(f"  fix: for the unchanged bytes, run the command on one worker ({first}), or use --json")


def _ending(code: int) -> str:
    """Return the exit code of a command as words; a code above 128 may stand for a signal (128 + its number)."""
    name = texts.signal_name(code - 128)
    return f"exit code {code} ({name})" if name else f"exit code {code}"


def _say_cut(hosts: Sequence[str]) -> None:
    output.warning(f"{texts.folded(hosts)}: the output was cut after {LONGEST // 2**20} MiB")


def said_by(stderr: bytes) -> bytes:
    """Return a command's standard error, with a clear message in place of a shell's message that it did not start."""

    def not_started(found: re.Match[bytes]) -> bytes:
        name, why = found[1], found[2]
        what = b"permission denied: " if why.startswith(b"Permission") else b"command not found: "
        line = _HINT if _OF_A_SHELL.search(name) else b""
        if re.search(rb"^(python3?|pip3?)$", name):
            line = b"; `tpu_ops configure` puts it on PATH, or give its full path: /opt/venvs/jax/bin/" + name
        return what + name + line

    return _NOT_STARTED.sub(not_started, stderr)


def exit_code(results: Sequence[Result], *, of_rank: bool = False) -> int:
    """Return the exit code of `tpu_ops run`: a failed command takes precedence over a worker that was not reached.

    Args:
        results: The results of the workers, in the workers' order.
        of_rank: Whether to return the exit code of the first worker where the command failed.
    """
    if failed := next((result for result in results if result.reached and not result.ok), None):
        return (failed.code if of_rank else None) or ExitCode.FAILED
    return ExitCode.OK if all(result.reached for result in results) else ExitCode.UNREACHABLE
