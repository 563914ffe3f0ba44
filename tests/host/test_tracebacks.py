"""The last traceback of a rank: found in its output however that is cut, and told while the rank stands still."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpu_ops.host import logs, tracebacks

RAISED = b'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    data["image"]\n'
ERROR = b"KeyError: 'image'\n"


def seen(*pieces: bytes) -> tracebacks.Watch:
    watch = tracebacks.Watch()
    for piece in pieces:
        watch.see(piece)
    return watch


@pytest.mark.parametrize("cut", range(1, len(RAISED + ERROR), 7))
def test_a_traceback_is_found_wherever_the_output_is_cut(cut: int) -> None:
    data = b"step 1\n" + RAISED + ERROR
    found = seen(data[:cut], data[cut:]).facts()
    assert found is not None
    assert (found["error"], found["text"]) == ("KeyError: 'image'", (RAISED + ERROR).decode().rstrip())


@pytest.mark.parametrize(
    ("output", "error", "last"),
    [
        # The latest of a chain is what ended the program.
        (RAISED + ERROR + b"\nDuring handling of that:\n\n" + RAISED + b"OSError: 5\n", "OSError: 5", "OSError: 5"),
        (
            RAISED + b"errors.JaxRuntimeError: OOM:\nallocating 9G\nof 8G\n\nmore\n",
            "errors.JaxRuntimeError: OOM:",
            "of 8G",
        ),
        (b"  + Exception Group " + RAISED + b"  | ValueError: 1\n", "| ValueError: 1", "  | ValueError: 1"),
        # As torchrun and loggers have it: something before each line.
        (b"".join(b"[rank0]: %s\n" % line for line in (RAISED + ERROR).splitlines()), "KeyError: 'image'", "KeyError"),
        (RAISED[:34], "", "Traceback (most recent call last):"),
        (RAISED + b"\xff\xfe: 1\n" + b"x" * 20_000, "\ufffd\ufffd: 1", "x" * 20),
    ],
)
def test_a_kept_traceback_names_the_exception_and_ends_with_its_text(output: bytes, error: str, last: str) -> None:
    found = seen(output).facts()
    assert found is not None
    assert found["error"] == error
    assert found["text"].splitlines()[-1].startswith(last)
    assert len(found["text"]) <= 8192


def test_output_without_one_has_none() -> None:
    assert seen(b"Traceback (most recent\n", b"call last):\n").facts() is None


def test_output_long_after_a_traceback_is_not_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tpu_ops.host.tracebacks.time.monotonic", lambda: now[0])
    watch = seen(RAISED, ERROR)
    now[0] += 300
    watch.see(b"F1125 client.h:80] another task died\n")
    found = watch.facts()
    assert found is not None
    assert found["text"].endswith("KeyError: 'image'")


@pytest.mark.parametrize(
    ("pieces", "still"),
    [
        ([RAISED, ERROR], True),
        ([b"step 1\n"], False),
        # It wrote so much behind it that it goes on.
        ([RAISED, ERROR, b"x" * 70_000], False),
    ],
)
def test_a_rank_stands_still_where_nothing_follows_its_traceback(
    pieces: list[bytes], still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("tpu_ops.host.tracebacks.time.monotonic", lambda: now[0])
    watch = seen(*pieces)
    now[0] += tracebacks.STILL - 0.1
    assert not watch.stands_still()
    now[0] += 0.2
    assert watch.stands_still() is still


@pytest.mark.parametrize(
    ("later", "found"),
    [
        ([], True),
        # All abort once the rank is given up, soon or after minutes.
        ([5.0], True),
        ([300.0, 300.1], True),
        # It goes on.
        ([5.0, 15.0], False),
    ],
)
def test_a_traceback_after_which_the_rank_went_on_is_dropped(
    later: list[float], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("tpu_ops.host.tracebacks.time.monotonic", lambda: now[0])
    watch = seen(RAISED, ERROR)
    for seconds in later:
        now[0] = 100.0 + seconds
        watch.see(b"line\n")
    assert (watch.facts() is not None) is found


def test_a_log_looks_for_them(tmp_path: Path) -> None:
    source, sink = os.pipe()
    logger = logs.Logger(source, str(tmp_path))
    logger.start()
    os.write(sink, b"step 1\n" + RAISED + ERROR)
    os.close(sink)
    logger.join(10)
    found = logger.tracebacks.facts()
    assert found is not None
    assert found["error"] == "KeyError: 'image'"
