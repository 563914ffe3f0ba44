"""The parts of workers that run a playbook on themselves, without workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_ops.ansible import archives, convergence, playing, receiver
from tpu_ops.ansible.archives import Archive
from tpu_ops.ansible.on_workers import Exchange, InOrder, Order, Play, Unsuitable, merged
from tpu_ops.ansible.playbook import Outcome, Said, Step
from tpu_ops.errors import OpsError
from tpu_ops.ssh import processes
from tpu_ops.ssh.masters import Unreachable

#: The beginning of all programs in place of the receiver. A login script writes a line before them.
GREETING = """
import json, sys
def say(**line):
    print(json.dumps(line), flush=True)
print("Welcome")
say(tpu_ops="receiver", python={python!r}, found="3.7", missing=["aaaa"])
"""
#: Takes the archive and the order, exchanges a value, and returns in `data` what it has received.
WHOLE = (
    GREETING.format(python="/usr/bin/python3")
    + """
archive = sys.stdin.read(int(sys.stdin.readline()))
order = json.loads(sys.stdin.readline())
host = order["options"][0]
say(said={"text": "hello"})
say(exchange={"of": host})
others = [host for _, hosts in json.loads(sys.stdin.readline()) for host in hosts]
say(step={"task": "t", "role": "r", "host": host, "outcome": "changed", "changes": ["/x"]})
got = [len(archive), *others]
say(outcome={"hosts": {host: {"ok": 1}}, "failures": [], "code": 0, "data": {"got": got}, "said": []})
"""
)


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ([], ["--tags=all,on_workers"]),
        (["--check", "-e", '{"a": 1}', "--tags=users,nfs"], ["--check", "--tags=users,nfs,on_workers"]),
        (["--skip-tags=jax"], ["--skip-tags=jax", "--tags=all,on_workers"]),
    ],
)
def test_workers_get_the_options_without_extra_variables_and_with_their_tag(options: list[str], own: list[str]) -> None:
    assert playing.options_of_workers(options) == own


def test_a_server_that_is_among_the_workers_is_not_left_out() -> None:
    counts = {"ok": 1}
    outcome = Outcome(
        {"store-w0": counts, "pod-w0": counts}, data={"nfs_left_out": ["store-w0", "b-w0", "a-w0", "b-w0"]}
    )
    assert convergence.left_out(outcome) == ["a-w0", "b-w0"]
    assert convergence.left_out(Outcome({"pod-w0": counts})) == []


class Machines:
    """Connections to workers that are processes of this machine.

    Args:
        programs: Worker -> the program in place of the receiver, or the error of the connection.
    """

    def __init__(self, programs: dict[str, str | Exception]) -> None:
        self._programs = programs

    @contextlib.asynccontextmanager
    async def attended(
        self, host: str, argv: Sequence[str], *, limit: int
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        program = self._programs[host]
        if isinstance(program, Exception):
            raise program
        async with processes.started([sys.executable, "-c", program], limit=limit) as process:
            yield process


def played(programs: dict[str, str | Exception]) -> tuple[Outcome, list[Step | Said]]:
    """Run a playbook on workers; return the outcome, and the steps and messages that were shown."""
    told: list[Step | Said] = []
    orders = {host: Order("site", [host], [], []) for host in programs}
    # More than a pipe holds: a worker that has ended is noticed while the archive is sent.
    sent = [Archive("aaaa", b"x" * 2**20), Archive("bbbb", b"is there")]
    return asyncio.run(Play(Machines(programs), orders, sent, told.append).run()), told


def test_workers_get_what_they_lack_and_their_order_and_exchange_values() -> None:
    outcome, told = played({"b": WHOLE, "a": WHOLE})
    assert (outcome.hosts, outcome.failures, outcome.code) == ({"a": {"ok": 1}, "b": {"ok": 1}}, [], 0)
    got = outcome.data["got"]
    assert (got[:3], got[0], sorted(got[1:3])) == (got[3:], 2**20, ["a", "b"])
    steps = [note for note in told if isinstance(note, Step)]
    assert {step.host: step.changes for step in steps} == {"a": ("/x",), "b": ("/x",)}
    assert [note for note in told if isinstance(note, Said)] == [Said("hello")], "equal messages are shown once"


@pytest.mark.parametrize(
    ("bad", "kind", "message", "code"),
    [
        (Unreachable("No route to host"), "unreachable", "No route to host", 4),
        ("import sys; sys.exit('sudo: a password is required')", "failed", "sudo: a password is required", 2),
        (GREETING.format(python="x") + "sys.exit('No space left')", "failed", "No space left", 2),
        (GREETING.format(python="x") + "sys.stdout.write('{'); sys.exit(255)", "unreachable", "connection ended", 4),
    ],
    ids=["no connection", "no start", "no end", "cut"],
)
def test_a_worker_that_does_not_finish_names_the_cause_and_others_go_on(
    bad: str | Exception, kind: str, message: str, code: int
) -> None:
    outcome, told = played({"bad": bad, "good": WHOLE})
    (failure,) = outcome.failures
    assert (failure.host, failure.outcome, outcome.code) == ("bad", kind, code)
    assert message in failure.message
    assert (outcome.hosts["bad"][kind], outcome.hosts["good"]) == (1, {"ok": 1})
    assert outcome.data == {"got": [2**20, "good"]}
    assert failure in told


def test_no_worker_begins_if_the_python_of_one_is_too_old(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    good = GREETING.format(python="x") + f"if sys.stdin.readline(): open({str(begun)!r}, 'w')"
    with pytest.raises(Unsuitable) as error:
        played({"good": good, "old": GREETING.format(python=None)})
    assert list(error.value.why) == ["old"]
    assert "its newest Python is 3.7" in error.value.why["old"]
    assert not begun.exists()


def test_an_error_of_this_machine_is_raised_as_it_is() -> None:
    with pytest.raises(OpsError, match="too few open files"):
        played({"a": WHOLE, "b": OpsError("too few open files", where="this machine", fix="none")})


def collected(answer: str) -> dict[str, object]:
    """Return worker -> values, as the action `exchange` does."""
    return {host: values for values, hosts in json.loads(answer) for host in hosts}


def test_an_exchange_gives_each_worker_the_values_of_all() -> None:
    async def main() -> list[str]:
        exchange = Exchange(["a", "b", "c"])
        return await asyncio.gather(*(exchange.give(host, {"x": x}) for host, x in (("a", 1), ("b", 2), ("c", 1))))

    answers = asyncio.run(main())
    assert len(set(answers)) == 1
    assert collected(answers[0]) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 1}}
    assert answers[0].count('"x"') == 2, "equal values are sent once"


def test_an_exchange_does_not_wait_for_a_worker_that_has_left_and_leaves_out_its_values() -> None:
    async def main() -> tuple[str, str]:
        exchange = Exchange(["a", "b", "c"])
        first = asyncio.create_task(exchange.give("a", {"x": 1}))
        gone = asyncio.create_task(exchange.give("b", {"x": 2}))
        await asyncio.sleep(0)
        await exchange.leave("b")
        await asyncio.sleep(0)
        assert not first.done(), "c has given nothing yet"
        last = await exchange.give("c", {"x": 3})
        gone.cancel()
        return await first, last

    first, last = asyncio.run(main())
    assert first == last
    assert collected(first) == {"a": {"x": 1}, "c": {"x": 3}}


def test_the_second_exchange_has_only_its_own_values() -> None:
    async def main() -> str:
        exchange = Exchange(["a"])
        await exchange.give("a", {"x": 1})
        return await exchange.give("a", {"y": 2})

    assert collected(asyncio.run(main())) == {"a": {"y": 2}}


@given(
    tasks=st.lists(st.sampled_from(["p", "q", "r"]), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    leaves=st.integers(0, 3),
)
def test_steps_are_told_task_by_task_however_they_arrive(tasks: list[str], order: object, leaves: int) -> None:
    told: list[Step] = []
    hosts = ["a", "b", "c"]

    def take(note: Step | Said) -> None:
        assert isinstance(note, Step)
        told.append(note)

    steps = InOrder(hosts, take)
    waiting = {host: [Step(task, "role", host, "ok") for task in tasks] for host in hosts}
    waiting["c"] = waiting["c"][: max(len(tasks) - leaves, 0)]
    while any(waiting.values()):
        host = order.choice([host for host in hosts if waiting[host]])  # type: ignore[attr-defined]
        steps.add(waiting[host].pop(0))
        if not waiting[host]:
            steps.leave(host)
    for host in hosts:
        steps.leave(host)
    assert len(told) == 3 * len(tasks) - min(leaves, len(tasks))
    assert [step.task for step in told if step.host == "a"] == tasks
    numbers = {host: [step.host for step in told].count(host) for host in hosts}
    assert numbers["a"] == numbers["b"] == len(tasks)
    # Between two steps of one task, no later task is told.
    seen = [
        (step.task, sum((one.host, one.task) == (step.host, step.task) for one in told[:number]))
        for number, step in enumerate(told)
    ]
    assert seen == [key for key in dict.fromkeys(seen) for _ in range(seen.count(key))]


def test_one_outcome_is_made_of_those_of_the_workers() -> None:
    counts = dict.fromkeys(("ok", "changed", "failed", "unreachable", "skipped", "rescued"), 0)
    failed = Step("t", "r", "w10", "failed", "why")
    outcome = merged(
        {
            "w10": Outcome({"w10": counts | {"failed": 1}}, [failed], 2, {"nfs_left_out": ["x"]}, ["same", "more"]),
            "w2": Outcome({"w2": counts}, [], 0, {"nfs_left_out": ["y"]}, ["same"]),
        }
    )
    assert list(outcome.hosts) == ["w2", "w10"]
    assert outcome.failures == [failed]
    assert outcome.code == 2
    assert outcome.data == {"nfs_left_out": ["x", "y"]}
    assert outcome.said == ["same", "more"]


def test_the_archive_of_ansible_has_what_a_playbook_needs_and_is_made_once(tmp_path: Path) -> None:
    made = archives.of_ansible(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(made.data)) as opened:
        names = set(opened.getnames())
    assert {
        "ansible/cli/playbook.py",
        "ansible_runner/interface.py",
        "yaml/__init__.py",
        "ClusterShell/NodeSet.py",
    } <= names
    assert not {name for name in names if name.startswith(("cryptography/", "ansible_test/", "ansible_collections/"))}
    (kept,) = tmp_path.iterdir()
    before = kept.stat().st_mtime_ns
    assert archives.of_ansible(tmp_path) == made
    assert kept.stat().st_mtime_ns == before


class Received:
    """The receiver in a process of its own, with archives that contain a program in place of `worker_play`.

    Args:
        kept: Directory of the archives.
        oldest: The oldest suitable version of Python.
        data: The archives, the first one of which has the program.
    """

    def __init__(self, kept: Path, oldest: str, *data: bytes) -> None:
        digests = [hashlib.sha256(each).hexdigest()[:16] for each in data]
        source = Path(receiver.__file__).read_text()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", source, str(kept), oldest, *digests],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout
        self.answer = json.loads(self.process.stdout.readline())


PROGRAM = "import sys; print(sys.stdin.readline().strip(), len(sys.argv), sys.executable.endswith('python3'))"


def archive(program: str = PROGRAM) -> bytes:
    """Return an archive with a program in place of `worker_play`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in (
            ("tpu_ops/__init__.py", ""),
            ("tpu_ops/ansible/__init__.py", ""),
            ("tpu_ops/ansible/worker_play.py", program),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def test_the_receiver_keeps_archives_removes_others_and_passes_its_input_on(tmp_path: Path) -> None:
    one, other = archive(), archive(PROGRAM + "\n")
    first = Received(tmp_path, "3.8", one)
    assert first.answer["missing"] == [hashlib.sha256(one).hexdigest()[:16]]
    assert first.answer["python"]
    out, err = first.process.communicate(b"%d\n" % len(one) + one + b"the order\n")
    assert (out, err) == (b"the order 2 True\n", b"")
    # The second time nothing is sent.
    again = Received(tmp_path, "3.8", one)
    assert again.answer["missing"] == []
    assert again.process.communicate(b"\nanother order\n") == (b"another order 2 True\n", b"")
    # Without the line of sizes nothing is run.
    assert Received(tmp_path, "3.8", one).process.communicate(b"") == (b"", b"")
    # Another version takes the place of the first one.
    second = Received(tmp_path, "3.8", other)
    second.process.communicate(b"%d\n" % len(other) + other + b"\n")
    assert [path.name for path in tmp_path.iterdir()] == [hashlib.sha256(other).hexdigest()[:16]]


@pytest.mark.parametrize("damage", ["missing", "empty", "directory"])
def test_a_damaged_archive_is_sent_again(tmp_path: Path, damage: str) -> None:
    data = archive()
    Received(tmp_path, "3.8", data).process.communicate(b"%d\n" % len(data) + data + b"\n")
    (place,) = tmp_path.iterdir()
    program = place / "tpu_ops" / "ansible" / "worker_play.py"
    if damage == "missing":
        program.unlink()
    elif damage == "empty":
        program.write_text("")
    else:
        shutil.rmtree(place)
        place.mkdir()
    again = Received(tmp_path, "3.8", data)
    assert again.answer["missing"] == [place.name]
    assert again.process.communicate(b"%d\n" % len(data) + data + b"order\n") == (b"order 2 True\n", b"")
    assert list(tmp_path.iterdir()) == [place]
    assert Received(tmp_path, "3.8", data).answer["missing"] == []


def test_an_archive_that_cannot_be_unpacked_names_directory_and_cause(tmp_path: Path) -> None:
    data, kept = archive(), tmp_path / "kept"
    kept.write_text("a file in place of the directory")
    _, err = Received(kept, "3.8", data).process.communicate(b"%d\n" % len(data) + data + b"\n")
    assert err.decode() == f"cannot keep the playbooks in {kept}: File exists\n"


def test_the_receiver_keeps_the_archives_that_another_one_uses(tmp_path: Path) -> None:
    used, other = archive("import sys; print('up', flush=True); sys.stdin.readline()"), archive()
    first = Received(tmp_path, "3.8", used)
    assert first.process.stdin
    assert first.process.stdout
    first.process.stdin.write(b"%d\n" % len(used) + used)
    first.process.stdin.flush()
    assert first.process.stdout.readline() == b"up\n"
    second = Received(tmp_path, "3.8", other)
    second.process.communicate(b"%d\n" % len(other) + other + b"\n")
    assert len(list(tmp_path.iterdir())) == 2
    first.process.communicate(b"\n")


@pytest.mark.parametrize(("sent", "said"), [("damaged", "damaged"), ("cut", "connection ended")])
def test_an_archive_that_does_not_arrive_whole_leaves_nothing(tmp_path: Path, sent: str, said: str) -> None:
    data = archive()
    received = Received(tmp_path, "3.8", data)
    wrong = data[:-20] + b"x" * 20 if sent == "damaged" else data[:-20]
    _, err = received.process.communicate(b"%d\n" % len(data) + wrong)
    assert said in err.decode()
    assert list(tmp_path.iterdir()) == []


def test_the_receiver_changes_nothing_without_a_suitable_python(tmp_path: Path) -> None:
    received = Received(tmp_path, "3.99", archive())
    assert received.answer["python"] is None
    received.process.communicate(b"")
    assert received.process.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("oldest", "found"), [((3, 90), "3.90"), ((3, 91), "3.100"), ((3, 101), None)], ids=["first", "newer", "none"]
)
def test_the_first_suitable_python_is_used_and_else_the_newest_is_named(
    tmp_path: Path, oldest: tuple[int, int], found: str | None
) -> None:
    for name, text in (
        ("3.90", "echo 3.90"),
        ("3.95", "exit 1"),
        ("3.100", "echo 3.100"),
        ("3.100-config", "echo 4.0"),
    ):
        (tmp_path / f"python{name}").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / f"python{name}").chmod(0o755)
    places = (f"{tmp_path}/python3.9?", f"{tmp_path}/python3.1*")
    path = found and f"{tmp_path}/python{found}"
    assert receiver.suitable(oldest, places) == (path, found or "3.100")
