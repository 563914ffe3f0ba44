"""The reason for a run's end is recorded even on a full disk, or the requester gets an error."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.alone import ALONE
from tests.support.specs import good, myself
from tpu_ops.host import actions, proc, rank_record, supervise, unit
from tpu_ops.host.after import after
from tpu_ops.host.caller import Caller
from tpu_ops.host.store import Store
from tpu_ops.protocol import spec, wire

STOP = {"kind": "stop", "by": "ada", "requested": True}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with a run whose supervisor is this process."""
    monkeypatch.setattr(actions, "require_root", lambda: None)
    monkeypatch.setattr(actions, "asking", myself)
    found = Store(str(tmp_path))
    found.prepare("r1", os.getuid(), os.getgid())
    found.write(rank_record.new_record(spec.check(good(**ALONE)), myself(), os.getuid(), "") | {"state": "running"})
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


def stop(store: Store, **request: Any) -> dict[str, Any]:
    asked = {"protocol": wire.PROTOCOL, "run_id": "r1", **request}
    return actions.stop(asked, store, Caller(0, attended=False))


@pytest.fixture
def supervisor(store: Store) -> Iterator[subprocess.Popen[bytes]]:
    """Have another process than this one be the supervisor of the run."""
    with subprocess.Popen(["sleep", "60"]) as found:
        own = {"pid": found.pid, "start": proc.start_time(found.pid)}
        store.write((store.read("r1") or {}) | {"supervisor": own})
        yield found
        found.kill()


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
    full_places = [f"{store.run_dir}/intents", store.directory("r1")]
    said = re.sub(r" \(/\S+ has [0-9.]+ of [0-9.]+ MiB free[^)]*\)", "", raised.value.message)
    assert said != raised.value.message
    assert said == "the request to end run r1 cannot be recorded: " + "; ".join(
        f"{place}: No space left on device" for place in full_places
    )
    assert f"`df {store.run_dir} {store.runs_dir};" in raised.value.fix
    assert left(store) == set()


STOPPING = "Job=1712\nActiveState=deactivating"


@pytest.mark.parametrize(
    ("host", "own", "by_hand"),
    [
        ("ActiveState=inactive", STOPPING, True),
        ("Job=\nActiveState=inactive", STOPPING, True),
        ("ActiveState=inactive\nJob=0", STOPPING, True),
        ("Job=1700\nActiveState=inactive", STOPPING, False),
        ("ActiveState=active", STOPPING, False),
        # systemd gives up its start, or somebody has sent the signal.
        ("ActiveState=inactive", "ActiveState=deactivating", False),
        ("ActiveState=inactive", "", False),
        ("", "", False),
        ("a warning\nActiveState=inactive", STOPPING, True),
        ("a warning", STOPPING, False),
    ],
)
def test_a_unit_is_stopped_by_hand_where_it_is_stopped_and_the_host_goes_on(host: str, own: str, by_hand: bool) -> None:
    assert unit.stops_alone(f"{host}\n\n{own}") is by_hand


def asked_to_end(store: Store, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], tuple[int, str]]) -> list[Any]:
    """Have a supervisor get SIGTERM, with systemd's answer; return why it ends, and who wants no other attempt."""

    def call(command: list[str], limit: float) -> tuple[int, str]:
        assert command == ["systemctl", "show", "--property=Job,ActiveState", "shutdown.target", unit.UNIT]
        assert limit <= 2, "the watchdog is quiet no longer"
        return answer()

    monkeypatch.setattr(unit, "call", call)
    supervisor = supervise.Supervisor(store, "r1")
    supervisor.record = store.read("r1") or {}
    supervisor._asked_to_end()
    intent = supervisor.intent or {}
    return [intent["kind"], intent["reason"], supervisor.record["stop_requested_by"]]


def test_a_unit_that_an_administrator_stops_is_no_host_that_shuts_down(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked_to_end(store, monkeypatch, lambda: (0, f"ActiveState=inactive\n\n{STOPPING}"))
    assert found == ["stop", "stopped by systemctl on w0", "an administrator"]


def no_answer() -> tuple[int, str]:
    raise wire.Refused("failed", "systemd did not answer")


def no_systemctl() -> tuple[int, str]:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", "systemctl")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: (0, f"Job=1700\nActiveState=inactive\n\n{STOPPING}"),
        lambda: (1, f"ActiveState=inactive\n\n{STOPPING}"),
        no_answer,
        no_systemctl,
    ],
    ids=["the host shuts down", "a failure", "no answer", "no systemctl"],
)
def test_an_end_that_systemd_does_not_report_as_a_stop_is_a_shutdown(
    store: Store, monkeypatch: pytest.MonkeyPatch, answer: Callable[[], tuple[int, str]]
) -> None:
    assert asked_to_end(store, monkeypatch, answer) == ["shutdown", "host shuts down", ""]


def test_a_stop_that_was_written_needs_no_word_of_systemd(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_intent("r1", STOP | {"reason": "stopped by ada"})
    found = asked_to_end(store, monkeypatch, lambda: pytest.fail("systemd is asked"))
    assert found == ["stop", "stopped by ada", "ada"]


@pytest.mark.parametrize("state", ["running", "failed"], ids=["before its last record", "before it has gone"])
@pytest.mark.parametrize("wanted", [True, False], ids=["of a person", "of a recovery"])
def test_a_stop_at_the_end_of_a_run_is_recorded_without_waiting(
    store: Store,
    supervisor: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    wanted: bool,
    state: str,
) -> None:
    """When the intent is written, all work after the run has been done."""
    monkeypatch.setattr("tpu_ops.host.after.chips_after", lambda: {"holders": []})
    store.write((store.read("r1") or {}) | {"state": state})
    put = store.put_intent

    def crossed(run_id: str, intent: dict[str, Any]) -> None:
        store.write((store.read("r1") or {}) | {"state": "failed"})
        supervisor.kill()
        supervisor.wait()
        after(store, "r1")
        put(run_id, intent)

    monkeypatch.setattr(store, "put_intent", crossed)
    answer = stop(store, **({} if wanted else {"reason": "a node is lost"}))
    found = store.read("r1") or {}
    assert (found["state"], found["stop_requested_by"]) == ("failed", myself().name if wanted else "")
    assert answer["record"] == found
    assert store.take_intent("r1") is None


def test_a_stop_at_the_end_keeps_the_request_for_the_next_attempt(
    store: Store, supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.put_intent

    def crossed(run_id: str, intent: dict[str, Any]) -> None:
        store.write((store.read("r1") or {}) | {"state": "failed"})
        supervisor.kill()
        supervisor.wait()
        put(run_id, STOP)

    monkeypatch.setattr(store, "put_intent", crossed)
    stop(store, reason="a node is lost")
    monkeypatch.setattr(store, "put_intent", put)
    assert store.take_intent("r1") == STOP


@pytest.mark.parametrize("first", [True, False])
def test_a_users_stop_request_comes_first_even_on_a_full_disk(
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
