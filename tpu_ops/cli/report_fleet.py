"""What `tpu_ops report` shows of the fleet."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tpu_ops import files, texts
from tpu_ops.cli import output
from tpu_ops.config import Settings
from tpu_ops.errors import ExitCode
from tpu_ops.fleet import contact, view
from tpu_ops.runs import fleet_report, report_page
from tpu_ops.runs.fleet_report import FleetReport, Node, Person

#: Number of days of use, by default and at most.
DAYS, MOST_DAYS = 7, 60
#: Seconds after which an unused node counts as idle.
IDLE_FOR = 12 * 3600.0

NODES = ("node", "zone", "type", "state", "tier", "chips", "chip_hours", "use", "last_use", "per_hour")
PEOPLE = ("person", "chip_hours", "share", "runs")


def run(settings: Settings, days: int, *, html: str | None, as_json: bool) -> int:
    """Ask the workers of the fleet, and print or write the report."""
    fleet, now = view.newest(settings)[0], time.time()
    for text in fleet.warnings:
        output.warning(text)
    begins = fleet_report.begins_of(now, days)
    answers = asyncio.run(fleet_report.ask(fleet, contact.fanout(fleet), begins[0]))
    found = fleet_report.compute(fleet, answers, begins, now, idle_for=IDLE_FOR)
    if html:
        write(html, report_page.of_fleet(found, IDLE_FOR))
    elif as_json:
        output.as_json(found.to_json())
    else:
        with output.read_or_not():
            show(found)
    for text in found.gaps:
        output.info(f"note: {text}")
    return ExitCode.OK


def write(word: str, page: str) -> None:
    """Write a page to the file that the user has named.

    Raises:
        OpsError: The file cannot be written.
    """
    path: Path = files.expanded(word, "--html").absolute()
    try:
        # Readable by this user only: the page has the output of a run.
        files.replace(path, page, 0o600)
    except OSError as exc:
        raise files.unwritable(path, exc) from exc
    output.line(f"{path} ({len(page.encode()) / 1000:.0f} kB)")


def show(found: FleetReport) -> None:
    """Print the report of a fleet as text."""
    if found.nodes:
        output.table([_node(one, found.made) for one in found.nodes], NODES)
        unknown = f", and {texts.count(found.unknown_prices, 'node')} of unknown price" if found.unknown_prices else ""
        output.line(f"together ${found.per_hour:,.2f} per hour{unknown} ({found.basis})")
    else:
        output.line("no node exists")
    output.line()
    total = sum(one.chip_hours for one in found.people)
    output.line(f"use of chips by runs in the last {texts.count(len(found.begins), 'day')}: {total:,.1f} chip-hours")
    if found.people:
        output.table([_person(one, total) for one in found.people], PEOPLE)


def _node(one: Node, now: float) -> dict[str, object]:
    ago = f" ({texts.ago(one.since, now)})" if one.since is not None and one.sign else ""
    dollars = "covered" if one.covered else "unknown" if one.per_hour is None else f"${one.per_hour:,.2f}"
    return {
        "node": one.node,
        "zone": one.zone,
        "type": one.kind,
        "state": one.state,
        "tier": one.tier,
        "chips": one.chips or "-",
        "chip_hours": f"{one.chip_hours:,.1f}",
        "use": one.use or "-",
        "last_use": f"{one.sign}{ago}",
        "per_hour": dollars,
    }


def _person(one: Person, total: float) -> dict[str, object]:
    share = f"{100 * one.chip_hours / total:.0f} %" if total else "-"
    return {"person": one.person, "chip_hours": f"{one.chip_hours:,.1f}", "share": share, "runs": one.runs}
