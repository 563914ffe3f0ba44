"""The names of the runs that tests start on the lab's workers."""

from __future__ import annotations

import re
from pathlib import Path

NAMED = re.compile(r'(?:\bname=|"--name", )"([^"]+)"')


def test_no_two_files_of_tests_use_one_name_since_a_worker_remembers_its_runs() -> None:
    users: dict[str, set[str]] = {}
    for path in Path(__file__).parent.glob("test_*_on_workers.py"):
        for name in NAMED.findall(path.read_text()):
            users.setdefault(name, set()).add(path.name)
    assert users
    assert {name: sorted(files) for name, files in users.items() if len(files) > 1} == {}
