"""`tpu_ops invite`: check a person's entry in users_people, create the account, and print the message to send."""

from __future__ import annotations

import argparse
from pathlib import Path

from tpu_ops import config, files, texts
from tpu_ops.ansible import convergence, invitations
from tpu_ops.cli import interrupts, options, output
from tpu_ops.cli.configure import Progress
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import origin, view
from tpu_ops.fleet.publishing import sources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops invite`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument("name", metavar="NAME", help="the login name of the person in users_people")
    parser.add_argument(
        "--no-configure", action="store_true", help="only check the entry and print the message; change no worker"
    )
    parser.add_argument("--file", metavar="FILE", help="write the message to this file instead of printing it")
    parser.epilog = (
        "The message has an ssh config and the host keys of the workers, for Linux, macOS and Windows without tpu_ops. "
        "It has no secrets. Send it again after addresses have changed."
    )


@interrupts.ended_by_signals()
def run(args: argparse.Namespace) -> int:
    """Check the entry, configure the workers where the person belongs, and print the message."""
    settings = config.load(args.fleet)
    file = Path.cwd() / files.expanded(args.file, "--file") if args.file else None
    fleet, _ = view.refresh(settings)
    for text in fleet.warnings:
        output.warning(text)
    progress = Progress()
    found = invitations.look(fleet, args.name, progress)
    for label, state in found.away.items():
        output.warning(f"{label} is {state} and not in the message; run this command again once it is READY")
    for host, why in found.ssh.left_out.items():
        output.warning(f"{host} is not in the ssh config of the message: it {why}")
    if not args.no_configure:
        output.info(f"{texts.folded([worker.host for worker in found.workers])}: creating or correcting the accounts")
        convergence.converge(fleet, found.workers, Progress, "users")
    source = origin.source_of(settings)
    text = invitations.message(found, sources.shown(source) if source else "")
    if file:
        try:
            files.replace(file, text, 0o644)
        except OSError as exc:
            raise files.unwritable(file, exc) from exc
    if args.json:
        output.as_json(
            {
                "person": args.name,
                "workers": [worker.host for worker in found.workers],
                "not_running": sorted(found.away),
                "configured": not args.no_configure,
                "ssh_config": found.ssh.config,
                "known_hosts": found.ssh.known_hosts,
                "message": text,
                "file": str(file) if file else "",
            }
        )
    elif file:
        output.line(f"the message to {args.name} is in {file}")
    else:
        output.as_it_is(text.removesuffix("\n"))
    return ExitCode.OK
