"""`tpu_ops doctor`: check the workers; print which checks passed, which failed, and how to fix the failures."""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from tpu_ops import config, texts
from tpu_ops.cli import faults as cli_faults
from tpu_ops.cli import options, output
from tpu_ops.cli.terminal import Meaning
from tpu_ops.cloud import bucket_places
from tpu_ops.errors import ExitCode, UsageError
from tpu_ops.fleet import contact, own_machine, targets, view
from tpu_ops.runs import bucket_access, doctor, preflight
from tpu_ops.runs.doctor import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops doctor`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME",
        help="also check the location of this bucket, and try on one worker of each node whether its service account "
        "can read it (repeatable)",
    )
    parser.add_argument(
        "--write", action="store_true", help="with --bucket: also write a small object there, and delete it"
    )
    parser.add_argument(
        "--self", action="store_true", help="check this machine instead: programs, ssh key, the API, the clock"
    )
    parser.add_argument("target", nargs="?", help="a node, a worker, a node set or a group (default: the whole fleet)")
    parser.epilog = (
        "If one run could use the whole target, all its workers are compared with each other; otherwise only the "
        "workers of each node. Exits with 1 if a check fails, and with 4 if a worker does not answer."
    )


def run(args: argparse.Namespace) -> int:
    """Check the workers, or this machine, and print the findings."""
    if args.write and not args.bucket:
        raise UsageError("this option goes with --bucket only", where="--write", fix="add --bucket NAME")
    if args.self:
        if args.target or args.bucket:
            raise UsageError("this option checks no worker", where="--self", fix="leave out TARGET and --bucket")
        return _examine_this_machine(functools.partial(config.load, args.fleet), as_json=args.json)
    names = list(dict.fromkeys(bucket_places.name_of(text, "--bucket") for text in args.bucket))
    settings = config.load(args.fleet)
    if args.target:
        fleet, workers = contact.find(settings, args.target)
        fleet = contact.serving(fleet, workers)
    else:
        fleet = view.current(settings)
        workers = list(fleet.workers)
    if not workers:
        raise UsageError("the fleet has no workers", where=str(settings.path), fix=targets.of_empty_fleet(fleet.listed))
    found = asyncio.run(doctor.examine(contact.fanout(fleet), workers, args.target or ""))
    if names:
        fanout = contact.fanout(fleet)
        found += asyncio.run(bucket_access.examine(fanout, workers, found, names, settings.auth, write=args.write))
    waiting = doctor.unconfigured(found, settings.state_dir)
    findings = [replace(finding, faults=cli_faults.named(finding.faults)) for finding in waiting]
    with output.read_or_not():
        if args.json:
            output.as_json([row(finding) for finding in findings])
        else:
            for finding in findings:
                show(finding)
    return exit_code(findings)


def _examine_this_machine(load: Callable[[], config.Settings], *, as_json: bool) -> int:
    """Print the checks of this machine as they are made."""
    found = []
    for check in own_machine.examine(load):
        found.append(check)
        if not as_json:
            word = "----" if check.passed is None else "PASS" if check.passed else "FAIL"
            meaning = {None: Meaning.NONE, True: Meaning.OK, False: Meaning.FAILED}[check.passed]
            output.line(f"{word}  {check.name}: {check.said}", meaning)
            if check.fix:
                output.line(f"        fix: {check.fix}")
    if as_json:
        output.as_json([check._asdict() for check in found])
    return ExitCode.FAILED if any(check.passed is False for check in found) else ExitCode.OK


def row(finding: Finding) -> dict[str, object]:
    """Return a finding for --json; ``passed`` is None if no worker could be checked."""
    return {
        "check": finding.check,
        "passed": finding.passed if finding.asked or finding.faults else None,
        "workers": list(finding.asked),
        "each_node": finding.each_node,
        "notes": list(finding.notes),
        "faults": [{"worker": fault.worker, "problem": fault.problem, "fix": fault.fix} for fault in finding.faults],
    }


def show(finding: Finding) -> None:
    """Print a finding: one line for the check, and two more lines for each kind of fault."""
    title = (doctor.CHECKS | bucket_access.CHECKS)[finding.check] + (", node by node" if finding.each_node else "")
    if not finding.faults:
        count = texts.count(len(finding.asked), "worker")
        if finding.asked:
            output.line(f"PASS  {title} ({count})", Meaning.OK)
        else:
            output.line(f"----  {title}: no worker could be checked")
        for text in finding.notes:
            output.line(f"        {text}")
        return
    hosts = sorted({fault.worker for fault in finding.faults})
    output.line(f"FAIL  {title}: failed on {texts.folded(hosts)}", Meaning.FAILED)
    faults = [
        {"worker": fault.worker, "problem": fault.problem, "fix": fault.fix or "none known"} for fault in finding.faults
    ]
    for entry in preflight.once_each(faults):
        output.line(f"        {entry['worker']}: {entry['problem']}")
        output.line(f"          fix: {entry['fix']}")


def exit_code(findings: Sequence[Finding]) -> int:
    """Return the command's exit code: a worker that did not answer takes precedence over any other fault."""
    faults = [fault for finding in findings for fault in finding.faults]
    if any(fault.unreachable for fault in faults):
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED if faults else ExitCode.OK
