"""Links between the pages lead somewhere, and so does each page that a message or a comment names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.fleet import ROOT

PAGES = sorted(
    path for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "roles/*/*.md") for path in ROOT.glob(pattern)
)
#: Where files may name pages of docs/ and READMEs of roles.
ROOMS = ("tpu_ops", "tools", "inventory", "inventory_plugins", "playbooks", "roles", "examples", "tests")
NAMED = re.compile(r"\b((?:docs|roles/\w+)/[\w-]+\.md)(?:, ([A-Z][\w ]+)\))?")


def text_of(path: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def headings(path: Path) -> list[str]:
    """Return the headings of a page."""
    return re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for heading in headings(path):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        copies = 0
        while (anchor := f"{slug}-{copies}" if copies else slug) in found:
            copies += 1
        found.add(anchor)
    return found


def links(path: Path) -> list[str]:
    """Return where the links of a page lead, without those to other sites."""
    text = re.sub(r"`[^`]*`", "", text_of(path))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_of_a_page_leads_to_a_file_and_a_heading_that_exist(page):
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_each_page_and_section_that_code_names_exists():
    missing = []
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if not path.is_file() or path.suffix not in {".py", ".sh", ".yml", ".j2", ".md"}:
                continue
            for name, section in NAMED.findall(path.read_text()):
                if not (ROOT / name).exists() or (section and section not in headings(ROOT / name)):
                    missing.append(f"{path.relative_to(ROOT)}: {name} {section}".strip())
    assert missing == []


def test_every_page_of_docs_is_in_the_table_of_the_readme():
    listed = {ROOT / link for link in links(ROOT / "README.md")}
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page not in listed] == []
