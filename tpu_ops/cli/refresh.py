"""`tpu_ops refresh`: ask the API or read a published snapshot, print the changes, rewrite ssh config and host keys."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tpu_ops import config, texts
from tpu_ops.cli import options, output
from tpu_ops.cloud.node import Worker
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, ExitCode, OpsError, UnreachableError, UsageError
from tpu_ops.files import UnwritableError
from tpu_ops.fleet import first_contact, origin, selection, view
from tpu_ops.fleet.diff import Changes
from tpu_ops.fleet.first_contact import Answer, Verdicts
from tpu_ops.fleet.publishing import sources
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh import host_keys, include, known_hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tpu_ops refresh`."""
    options.add_fleet(parser)
    options.add_json(parser)
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="read a published snapshot: PATH, https://..., gs://BUCKET/OBJECT or ssh:HOST[:PATH]; remembered for "
        "later; `api` goes back to the API",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what changed; write nothing")
    parser.add_argument(
        "--verify-keys",
        action="store_true",
        help="compare the known host keys of all nodes with the published keys and the keys that the workers use; "
        "fails if another machine answers, or a key cannot be compared",
    )
    parser.add_argument(
        "--trust-first",
        action="append",
        default=[],
        metavar="NODE",
        help="for a node that publishes no host keys: show the keys that its workers use, and record them (repeatable)",
    )
    parser.add_argument("--yes", action="store_true", help="record the host keys of --trust-first without asking")


def after_change(settings: Settings, stale: str) -> Fleet | None:
    """Refresh the fleet after a command has changed it in the cloud. A failure is only a warning; None is returned.

    Args:
        settings: The fleet's settings.
        stale: What the snapshot still says if the refresh fails, as the beginning of the warning.
    """
    try:
        fleet, _ = view.refresh(settings)
    except (CloudError, UnwritableError) as exc:
        output.warning(f"{stale}, since the refresh failed: {exc}; `tpu_ops refresh` updates the snapshot")
        return None
    return fleet


def run(args: argparse.Namespace) -> int:
    """Refresh the view of the fleet."""
    settings = config.load(args.fleet)
    _check(args)
    source = None if args.source is None else sources.parse(args.source, Path.cwd(), "--from")
    if args.dry_run:
        fleet, changes = view.look(settings, source=source)
    else:
        fleet, changes = view.refresh(settings, verify_keys=args.verify_keys, source=source, told=True)
    chosen = first_contact.workers_of(fleet, args.trust_first)
    about = tuple(host_keys.about(worker.label) for worker in chosen)
    warnings = [text for text in fleet.warnings if not about or not text.startswith(about) or host_keys.is_denial(text)]
    warnings += selection.unreachable(settings, fleet.listed, asked=not args.dry_run)
    unknown = {host: why for host, why in fleet.compared.items() if why}
    warnings += _not_compared(unknown)
    seen = _contacted(settings, fleet)
    warnings += _of_verdicts(settings, seen)
    for text in warnings:
        output.warning(text)
    if not args.json:
        with _seen(args):
            _show(args, fleet, changes, source, seen)
    answers = _trust(args, settings, fleet, chosen) if chosen else []
    silent = [answer for answer in answers if answer.problem]
    if args.json:
        told = {**changes.to_json(), "warnings": warnings, "workers": len(fleet.workers)}
        if not args.dry_run:
            told |= {"ssh_config": str(fleet.ssh_config), "known_hosts": str(fleet.known_hosts)}
        if args.verify_keys:
            told |= {"compared": [host for host in fleet.compared if host not in unknown], "not_compared": unknown}
            told |= {
                "same_machine": [answer.worker.host for answer in seen.same],
                "another_machine": _rows(seen.others),
                "no_answer": {answer.worker.host: answer.problem for answer in seen.silent},
            }
        if args.trust_first:
            told |= {"contacted": _rows(answers), "silent": {answer.worker.host: answer.problem for answer in silent}}
        with output.read_or_not():
            output.as_json(told)
    if seen.others:
        first, places = seen.others[0].worker, [f"{answer.worker.host} ({answer.address})" for answer in seen.others]
        published = first.host not in unknown
        raise host_keys.another_machine(places, first.host_key_alias, fleet.known_hosts, published=published)
    if silent:
        raise UnreachableError(
            f"{len(silent)} of {len(answers)} workers did not answer with a host key: {silent[0].problem}",
            where=" ".join(answer.worker.host for answer in silent),
            fix="see the reason, then run this again; workers with a recorded key are not contacted again",
        )
    if unknown:
        raise CloudError(
            f"the host keys of {len(unknown)} of {texts.count(len(fleet.compared), 'worker')} could not be compared",
            where=texts.some(list(unknown)),
            fix="the warnings say why; run this again, or see the keys on the workers' serial consoles (docs/ssh.md)",
        )
    if seen.silent:
        raise UnreachableError(
            f"{len(seen.silent)} of {texts.count(len(fleet.compared), 'worker')} did not answer with a host key, so "
            f"which machines are there is not known: {seen.silent[0].problem}",
            where=texts.some([answer.worker.host for answer in seen.silent]),
            fix="run this again once these workers answer; `tpu_ops list` shows the states of their nodes",
        )
    return ExitCode.OK


def _contacted(settings: Settings, fleet: Fleet) -> Verdicts:
    """Compare the known host keys of workers with the keys that the workers use, without a login."""
    workers = [worker for worker in selection.reached(settings, fleet.listed) if worker.host in fleet.compared]
    return first_contact.verify(settings, fleet, workers) if workers else Verdicts((), (), ())


def _of_verdicts(settings: Settings, seen: Verdicts) -> list[str]:
    """Return a warning for each worker that answers with an unknown host key or does not answer."""
    known = host_keys.keys_of(settings) if seen.others else {}
    warnings = []
    for answer in seen.others:
        blobs = known.get(answer.worker.host_key_alias, {})
        before = ", ".join(known_hosts.fingerprint(blob) for kind, blob in blobs.items() if kind == answer.key_type)
        now = f"the machine at {answer.address} answers with {answer.key_type} {answer.fingerprint}"
        warnings.append(f"{answer.worker.host}: {now}; the known key is {before or ' and '.join(blobs)}")
    silent = (f"{answer.worker.host} did not answer with a host key: {answer.problem}" for answer in seen.silent)
    return [*warnings, *silent]


@contextlib.contextmanager
def _seen(args: argparse.Namespace) -> Iterator[None]:
    """Handle a closed pipe while a result is printed: ignore it, unless the user has to confirm the result.

    Raises:
        OpsError: The pipe is closed, so the user cannot see the host keys that have to be confirmed.
    """
    asks = args.trust_first and not (args.yes or args.dry_run)
    try:
        with contextlib.nullcontext() if asks else output.read_or_not():
            yield
    except BrokenPipeError as exc:
        output.give_up()
        what = "the host keys cannot be shown for confirmation, and none was trusted"
        raise OpsError(what, where="standard output", fix="leave it open, or add --yes") from exc


def _show(args: argparse.Namespace, fleet: Fleet, changes: Changes, source: str | None, seen: Verdicts) -> None:
    """Print what changed in the fleet, and how to use the written ssh config."""
    for text in changes.news():
        output.line(text)
    output.line(summary(fleet, changes))
    if args.verify_keys:
        same = list(fleet.compared.values()).count("")
        output.line(f"host keys of {texts.count(same, 'worker')} compared")
        output.line(f"{len(seen.same)} of {texts.count(len(fleet.compared), 'worker')} answered with a known host key")
    if fleet.source:
        output.line(fleet.age)
    if source is not None and source != origin.source_of(fleet.settings) and not args.dry_run:
        output.info(f"`snapshot` is set ({fleet.settings.snapshot}): other commands still read that snapshot")
    if not args.dry_run:
        path = fleet.ssh_config
        output.line("ssh HOST" if include.installed(path) else f"ssh -F {shlex.quote(str(path))} HOST")


def _not_compared(unknown: Mapping[str, str]) -> list[str]:
    """Return one warning for each reason why keys could not be compared, given host -> reason."""
    hosts: dict[str, list[str]] = {}
    for host, why in unknown.items():
        hosts.setdefault(why, []).append(host)
    return [
        f"the host keys of {texts.some(few, 4, 'others')} could not be compared: {why}" for why, few in hosts.items()
    ]


def _check(args: argparse.Namespace) -> None:
    """Refuse options that cannot be combined.

    Raises:
        UsageError: Such options are given.
    """
    if args.yes and not args.trust_first:
        raise UsageError("there is nothing to confirm", where="--yes", fix="use it with --trust-first NODE")
    if args.verify_keys and args.dry_run:
        raise UsageError(
            "a dry run does not ask for host keys",
            where="--verify-keys",
            fix="leave --dry-run out: nothing is written if a key has changed",
        )
    if args.trust_first and args.json and not (args.yes or args.dry_run):
        raise UsageError(
            "with --json you cannot be asked to confirm",
            where="--trust-first",
            fix="add --dry-run to see the fingerprints, then --yes",
        )


def _trust(args: argparse.Namespace, settings: Settings, fleet: Fleet, chosen: Sequence[Worker]) -> list[Answer]:
    """Contact workers without a known host key; record the keys that they answer with after confirmation."""
    known = first_contact.not_to_contact(settings, chosen, ask_api=args.dry_run and not fleet.source)
    for worker in chosen:
        if why := known.get(worker.host_key_alias):
            output.info(f"{worker.host} {why}: not contacting it")
    lacking = [worker for worker in chosen if worker.host_key_alias not in known]
    first_contact.must_be_heard(lacking, fleet.unheard)
    if lacking:
        output.info(f"contacting {texts.count(len(lacking), 'worker')}")
    answers = first_contact.ask(settings, fleet, lacking)
    found = [answer for answer in answers if not answer.problem]
    if found and not args.json:
        with _seen(args):
            output.table(_rows(found), ("worker", "type", "fingerprint"))
    if not found or args.dry_run:
        return answers
    what = "this host key" if len(found) == 1 else f"these {len(found)} host keys"
    if not args.yes and not options.confirmed(f"trust {what} from now on?", "trusting a host key on first contact"):
        raise OpsError(
            "not confirmed: none of these host keys was recorded",
            where=str(fleet.known_hosts),
            fix="compare the fingerprints, then run this again and answer y",
        )
    first_contact.record(settings, found)
    output.info(f"recorded in {fleet.known_hosts}")
    return answers


def _rows(answers: Sequence[Answer]) -> list[dict[str, str]]:
    return [
        {"worker": answer.worker.host, "type": answer.key_type, "fingerprint": answer.fingerprint}
        for answer in answers
        if not answer.problem
    ]


def summary(fleet: Fleet, changes: Changes) -> str:
    """Return the last line of the result: the size of the fleet, and whether anything changed."""
    size = f"{texts.count(len(fleet.nodes), 'node')}, {texts.count(len(fleet.workers), 'worker')}"
    if changes.first:
        return f"first look: {size}"
    return size if changes else f"{size}, no change"
