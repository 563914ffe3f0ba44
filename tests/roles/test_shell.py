"""What the role shell does on a host without git."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

SHELL = Path(__file__).resolve().parents[2] / "roles" / "shell"
FETCHED, SAID = "Fetch Oh My Zsh", "Report that Oh My Zsh will be fetched once git is installed"


@pytest.mark.parametrize(
    ("url", "check", "packages", "skip_done", "done"),
    [
        ("https://x.example/zsh.git", False, ["git"], True, [FETCHED]),
        ("https://x.example/zsh.git", True, ["git"], True, [FETCHED]),
        # Whoever runs the role alone is told by git's module what is missing.
        ("https://x.example/zsh.git", False, [], True, [FETCHED]),
        ("https://x.example/zsh.git", True, [], True, [SAID]),
        # Without skips no package is known.
        ("https://x.example/zsh.git", True, [], False, [FETCHED]),
        ("", True, [], True, []),
        ("", False, ["git"], True, []),
    ],
)
def test_check_mode_asks_no_git_that_is_not_there_yet(
    url: str, check: bool, packages: list[str], skip_done: bool, done: list[str]
) -> None:
    loader = DataLoader()
    variables = {
        "ansible_check_mode": check,
        "ansible_facts": {"worker": {"packages": packages, "skip_done": skip_done}},
        "shell_oh_my_zsh_url": url,
    }
    named = loader.load_from_file(str(SHELL / "vars/main.yml"), trusted_as_template=True)
    tasks = loader.load_from_file(str(SHELL / "tasks/main.yml"), trusted_as_template=True)
    found = [
        task["name"]
        for task in tasks
        if "Oh My Zsh" in task["name"] and Templar(loader, named | variables).evaluate_conditional(task["when"])
    ]
    assert found == done
