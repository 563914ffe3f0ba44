"""Renders reports as HTML pages that are whole by themselves: no script, no file beside them, no network.

All texts come from workers, programs and users. Jinja2 escapes them; `shown` replaces what cannot be printed.
"""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Any

from tpu_ops import __version__, texts
from tpu_ops.errors import printable
from tpu_ops.runs import ranks, report_pictures
from tpu_ops.runs.fleet_report import FleetReport
from tpu_ops.runs.outcomes import ending
from tpu_ops.runs.report_data import Report

TEMPLATES = Path(__file__).resolve().parent / "templates"
#: Sequences with which programs colour their output.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]")


def of_run(report: Report) -> str:
    """Return the page of a run's report."""
    along = report_pictures.axis(report)
    charts = [
        (f"Use of the chips ({report.use_of})", report.use, report_pictures.percent),
        ("HBM in use", report.hbm, report_pictures.percent),
        ("Output of a rank", report.output, report_pictures.rate),
    ]
    return rendered(
        "run.html.j2",
        report=report,
        command=shlex.join(report.argv),
        timeline=report_pictures.timeline(report),
        charts=[(title, draw(curve, along)) for title, curve, draw in charts if curve.is_known],
        lasted=texts.lasting((report.ended or report.made) - report.since) if report.since is not None else "",
    )


def of_fleet(report: FleetReport, idle_for: float) -> str:
    """Return the page of a fleet's report; ``idle_for`` is after how many seconds an unused node is idle."""
    people = {one.person: one.days for one in report.people}
    return rendered(
        "fleet.html.j2",
        report=report,
        days=report_pictures.days(report.begins, people, "chip-hours"),
        total=sum(one.chip_hours for one in report.people),
        idle_for=texts.age(idle_for),
    )


def rendered(template: str, **values: Any) -> str:
    """Return a template with its values, in which all texts are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(at=_at, ending=ending, percent=_percent, dollars=_dollars, ranks=ranks.titled)
    environment.globals.update(version=__version__, pictures=report_pictures, colour=report_pictures.colour)
    return environment.get_template(template).render(values)


def shown(value: Any) -> Any:
    """Return a value as a page shows it: lines without control characters, and without colours of terminals."""
    if type(value) is not str:
        return "" if value is None else value
    plain = _COLOURS.sub("", value)
    # A carriage return goes back to the beginning of the line, as progress bars do.
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n"))
    return "\n".join(printable(line.replace("\t", "    ")) for line in lines)


def _at(moment: float | None) -> str:
    return "-" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _dollars(amount: float | None) -> str:
    return "unknown" if amount is None else f"${amount:,.2f}"
