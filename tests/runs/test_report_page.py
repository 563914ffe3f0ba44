"""The pages of reports, in a real browser: whole by themselves, without scripts, whatever text is in them."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support import reports
from tests.support.browser import Browser, needs_browser
from tpu_ops.runs import report_data, report_page
from tpu_ops.runs.outcomes import Outcome, outcome_of
from tpu_ops.runs.report_data import Place, Sources

#: Text that is harmful where it is not escaped.
HOSTILE = "</pre></title></svg><script>document.title = 'owned'</script><img src=x onerror=alert(1)>\"'{{ 7 * 7 }}&amp;"


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


class Page(HTMLParser):
    """The elements, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hostile() -> Sources:
    """Return a run in which every text that comes from elsewhere is hostile."""
    text = HOSTILE
    facts: dict[str, Any] = {
        "argv": ["python", text],
        "cwd": text,
        "started_from": text,
        "code_digest": text,
        "person": {"uid": 1, "name": text},
        "reason": text,
        "state": "failed",
        "notes": [text],
        "first": {"rank": 0, "worker": text, "cause": text},
        "exited": reports.BEGIN + 100,
        "ended": reports.BEGIN + 100,
        "traceback": {"at": reports.BEGIN + 10, "error": text, "text": text},
    }
    record = reports.record(0, 1, **facts)
    watch = {"stall": {"at": reports.BEGIN, "sign": text}, "maintenance": {"at": reports.BEGIN, "what": text}}
    process: dict[str, Any] = {"command": text, "why": text, "source": text, "state": text}
    process |= {"threads": [{"name": text, "frames": [[text, text, text]]}]}
    answer = {
        "record": record,
        "watch": {**watch, "chips": text},
        "tail": f"\x1b[31m{text}\x1b[0m\0\x07\u202e\udcff",
        "stacks": {"processes": [process], "omitted": text},
        "environment": {"path": text, "python": text, "digest": text, "packages": {text: text}},
        "history": [{"t": reports.BEGIN + index, "out": index, "cores": [], "state": text} for index in range(9)],
        "attempts": [{**record, "state": text, "attempt": 0}],
    }
    outcomes = (outcome_of(0, text, record), Outcome(1, text, text, reason=text))
    place = Place(text, text, text, 1)
    return Sources(
        text, outcomes, {0: answer}, (place,), recovery=text, project=text, state=text, now=reports.BEGIN + 200
    )


@pytest.mark.parametrize("made", [reports.of_run, hostile])
def test_a_page_names_no_other_file_and_has_no_script(made: Any) -> None:
    page = report_page.of_run(report_data.compute(made()))
    found = Page(page)
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert found.tags.keys() <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "span", "dl", "dt", "dd", "code"),
        *(
            "small",
            "pre",
            "svg",
            "line",
            "text",
            "rect",
            "polygon",
            "polyline",
            "i",
            "table",
            "tr",
            "th",
            "td",
            "footer",
        ),
    }
    assert not found.attributes & {"src", "href", "srcdoc", "style", "action", "xlink:href"}
    assert not [name for name in found.attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|http:|https:", page)
    page.encode("utf-8")


def test_hostile_text_stays_text() -> None:
    page = report_page.of_run(report_data.compute(hostile()))
    texts = Page(page).texts
    assert sum(HOSTILE in text for text in texts) > 15
    assert not set("\x1b\0\x07\u202e\udcff") & set(page)


def test_progress_bars_and_colours_of_a_terminal_are_what_was_seen() -> None:
    given = reports.of_run(1)
    given.told[0]["tail"] = "10 %\r50 %\r\x1b[1;32m100 %\x1b[0m\nnext\r\n\tindented"  # type: ignore[index]
    assert "<pre>100 %\nnext\n    indented</pre>" in report_page.of_run(report_data.compute(given))


@needs_browser
def test_the_page_is_drawn_in_both_colour_schemes_and_printed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "a #report of 100%.html"
    page.write_text(report_page.of_run(report_data.compute(reports.of_run())))
    light, dark = (browser.colours(page, dark=dark) for dark in (False, True))
    assert max(light, key=lambda colour: light[colour]) == "#ffffff"
    assert max(dark, key=lambda colour: dark[colour]) == "#14181d"
    # The ends of the bars of ranks that failed and were stopped, and the curves.
    assert min(light.get(colour, 0) for colour in ("#c83c3c", "#8a8f98", "#3b82c4")) > 100
    assert browser.pdf(page).startswith(b"%PDF")


@needs_browser
def test_nothing_of_a_hostile_page_is_executed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report_page.of_run(report_data.compute(replace(hostile(), run_id="r1"))))
    found = Page(browser.dom(page))
    assert not found.tags.keys() & {"script", "img"}
    assert "Run r1" in found.texts
    assert "owned" not in "".join(text for text in found.texts if "script" not in text)
