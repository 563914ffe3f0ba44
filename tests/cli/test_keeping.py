"""The rounds of `tpu_ops apply --watch`."""

from __future__ import annotations

import signal

import pytest

from tpu_ops.cli import keeping
from tpu_ops.errors import CloudError


@pytest.mark.parametrize(
    ("every", "failures", "seconds"),
    [(60, 0, 60), (60, 1, 120), (60, 3, 480), (60, 4, 600), (60, 10**6, 600), (3600, 5, 3600), (0.1, 1, 0.2)],
)
def test_pauses_grow_after_failures_up_to_ten_minutes(every: float, failures: int, seconds: float) -> None:
    assert keeping.pause(every, failures) == seconds


def test_a_message_is_printed_again_only_after_a_round_without_it(capfd: pytest.CaptureFixture[str]) -> None:
    told = keeping.Told()
    for texts in (["a", "a"], ["a", "b"], [], ["a"]):
        told.next_round()
        for text in texts:
            told(text)
    assert capfd.readouterr().err.split() == ["a", "b", "a"]


def test_rounds_go_on_after_errors_until_sigterm(capfd: pytest.CaptureFixture[str]) -> None:
    rounds = iter([CloudError("lost"), CloudError("lost"), True, signal.SIGTERM])

    def look(_: keeping.Told) -> bool:
        found = next(rounds)
        if isinstance(found, CloudError):
            raise found
        if isinstance(found, signal.Signals):
            signal.raise_signal(found)
        return True

    assert keeping.watch(look, 0.001) == 0
    assert capfd.readouterr().err.splitlines() == ["warning: lost", "the last round succeeded again"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sigterm_that_comes_while_python_runs_a_finalizer_ends_the_rounds_too() -> None:
    class Thing:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    rounds = []

    def look(_: keeping.Told) -> bool:
        rounds.append("begun")
        assert len(rounds) == 1
        Thing()
        rounds.append("ended")
        return True

    assert keeping.watch(look, 0.001) == 0
    assert rounds == ["begun", "ended"]


def test_ctrl_c_interrupts_the_rounds() -> None:
    def look(_: keeping.Told) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    # A shell in the background starts programs with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            keeping.watch(look, 0.001)
    finally:
        signal.signal(signal.SIGINT, before)
