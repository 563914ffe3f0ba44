"""Why a run is being ended finds a place on a full host too, or whoever asks for it is told."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.alone import ALONE
from tests.support.specs import good, myself
from tpu_ops.host import actions, record, spec, wire
from tpu_ops.host.store import Store

STOP = {"kind": "stop", "by": "ada", "requested": True}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a run whose supervisor is this process."""
    monkeypatch.setattr(actions, "require_root", lambda: None)
    monkeypatch.setattr(actions, "asking", myself)
    found = Store(str(tmp_path))
    found.prepare("r1", os.getuid(), os.getgid())
    found.write(record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "") | {"state": "running"})
    return found


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have what stands below these directories take no more than the beginning of a file."""
    dump = json.dump

    def fill(*folders: str) -> None:
        def dumped(data: Any, file: Any, **options: Any) -> None:
            if str(Path(f"/proc/self/fd/{file.fileno()}").readlink()).startswith(folders):
                file.write("{")
                raise OSError(errno.ENOSPC, "No space left on device")
            dump(data, file, **options)

        monkeypatch.setattr("json.dump", dumped)

    return fill


def left(store: Store) -> set[str]:
    """Return what intents have left behind."""
    places = (Path(store.run_dir, "intents"), Path(store.directory("r1")))
    return {path.name for place in places if place.is_dir() for path in place.iterdir()} - {
        "record.json",
        "log",
        "files",
    }


def stop(store: Store) -> dict[str, Any]:
    return actions.stop({"protocol": wire.PROTOCOL, "run_id": "r1"}, store, wire.Caller(0, attended=False))


def test_a_run_is_stopped_where_memory_takes_no_intent(
    store: Store, full: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    full(store.run_dir)
    told: list[Any] = []

    def ends(pid: int, number: int) -> None:
        told.append((pid, number, store.take_intent("r1")))
        store.write((store.read("r1") or {}) | {"state": "stopped"})

    monkeypatch.setattr("tpu_ops.host.actions.os.kill", ends)
    assert stop(store)["record"]["state"] == "stopped"
    ((pid, number, intent),) = told
    assert (pid, number) == (os.getpid(), signal.SIGTERM)
    assert (intent["kind"], intent["by"], intent["requested"]) == ("stop", myself().name, True)
    assert left(store) == set()


def test_a_stop_that_no_disk_takes_is_refused_in_words_and_leaves_nothing(
    store: Store, full: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    full(store.root)
    monkeypatch.setattr("tpu_ops.host.actions.os.kill", lambda *_: pytest.fail("it would count as a shutdown"))
    with pytest.raises(wire.Refused) as raised:
        stop(store)
    assert raised.value.message == (
        f"the request to end run r1 cannot be recorded: {store.run_dir}/intents: No space left on device; "
        f"{store.directory('r1')}: No space left on device"
    )
    assert "df" in raised.value.fix
    assert left(store) == set()


@pytest.mark.parametrize("first", [True, False])
def test_what_a_person_asks_for_comes_first_wherever_there_was_room_for_it(
    store: Store, full: Callable[..., None], first: bool
) -> None:
    told: list[dict[str, Any]] = [STOP, {"kind": "stop", "requested": False}]
    one, other = told if first else reversed(told)
    store.put_intent("r1", one)
    full(store.run_dir)
    store.put_intent("r1", other)
    assert left(store) == {"r1.json", "intent.json"}
    assert [store.take_intent("r1") for _ in range(2)] == [STOP, None]
    assert left(store) == set()


def test_an_intent_that_nobody_took_goes_with_its_run(
    store: Store, full: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    full(store.run_dir)
    store.put_intent("r1", STOP)
    store.write((store.read("r1") or {}) | {"state": "failed"})
    monkeypatch.setattr("tpu_ops.host.store.KEPT_RUNS", 0)
    store.prepare("r2", os.getuid(), os.getgid())
    assert not Path(store.directory("r1")).exists()
