"""tools/failures.sh: what failed in the parts of make test, told at its end."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAILED = "make[2]: *** [Makefile:70: lab-test-runs] Error 1\n"


@pytest.fixture
def told(tmp_path):
    """A part that said some words: what is told of it."""

    def ask(words: str) -> str:
        log = tmp_path / "runs.log"
        log.write_text(words)
        done = subprocess.run([ROOT / "tools" / "failures.sh", log], capture_output=True, text=True, check=True)
        return done.stdout.replace(str(log), "LOG")

    return ask


def test_tests_that_failed_are_named(told):
    words = "tests/a.py::test_b FAILED [1%]\nFAILED tests/a.py::test_b - assert 1 == 2\nSKIPPED [1] c\n"
    assert told(words + FAILED) == "failed in LOG:\nFAILED tests/a.py::test_b - assert 1 == 2\n"


def test_of_another_program_the_last_words_are_told(told):
    assert told("first\n" * 30 + "ERROR    site failed\n" + FAILED).splitlines()[-2:] == [
        "ERROR    site failed",
        FAILED.strip(),
    ]
    assert told("first\n" * 30 + FAILED).count("first") == 19


def test_nothing_is_told_of_a_part_that_passed(told):
    assert told("FAILED is a word\n1 passed\n") == ""
