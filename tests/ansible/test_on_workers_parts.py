"""What the controller does while workers run a playbook on themselves, without workers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_ops.ansible import archives, receiver
from tpu_ops.ansible.on_workers import Exchange, InOrder, merged
from tpu_ops.ansible.playbook import Outcome, Said, Step


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
    # Another version takes the place of the first one.
    second = Received(tmp_path, "3.8", other)
    second.process.communicate(b"%d\n" % len(other) + other + b"\n")
    assert [path.name for path in tmp_path.iterdir()] == [hashlib.sha256(other).hexdigest()[:16]]


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


def test_the_receiver_names_the_newest_python_if_none_is_suitable(tmp_path: Path) -> None:
    received = Received(tmp_path, "3.99", archive())
    assert received.answer["python"] is None
    assert received.answer["found"]
    received.process.communicate(b"")
    assert received.process.returncode == 0
