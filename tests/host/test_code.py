"""A run has the code of its start, and no sync replaces this code during the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.specs import good, myself
from tpu_ops.host import child, code
from tpu_ops.host.code import Copy
from tpu_ops.host.command import NotReady
from tpu_ops.protocol import marks, spec

FILES = {"train.py": "x", "pkg/part.py": "y"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home to which a sync has brought the directory `code`."""
    place = tmp_path / "tpu_ops/code"
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    (tmp_path / "tpu_ops/.synced").mkdir()
    (tmp_path / "tpu_ops/.synced/code").write_bytes(b"\0".join(map(os.fsencode, sorted(FILES))))
    return tmp_path


def copy_of(home: Path) -> Copy:
    """Return what a run is told of the copy as it is now."""
    digest = marks.digest_of(os.fsencode(home / "tpu_ops"), b"code")
    return Copy(str(home / "tpu_ops/code"), digest, {"run_id": "exp", "person": "ada", "since": 5.0})


def held(home: Path, copy: Copy, *argv: str, output: int = -1) -> child.Child:
    """Fork a command that starts in the copy."""
    with Path(os.devnull).open("wb") as sink:
        output = sink.fileno() if output < 0 else output
        path = {b"PATH": b"/usr/bin:/bin"}
        return child.Child.fork(list(argv or ["true"]), path, str(home / "tpu_ops/code"), myself(), output, copy=copy)


def sync_may_change(home: Path) -> bool:
    """Return whether a sync would be let in."""
    lock = marks.opened(marks.use_lock(os.fsencode(home / "tpu_ops"), b"code"))
    assert lock is not None
    try:
        return marks.take(lock)
    finally:
        os.close(lock)


def end(process: child.Child) -> None:
    process.drop()
    os.waitpid(process.pid, 0)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda place: (place / "results.txt").write_text("of a run"), True),
        (lambda place: (place / "train.py").write_text("z"), False),
        (lambda place: (place / "train.py").chmod(0o755), False),
        (lambda place: (place / "pkg/part.py").unlink(), False),
        (lambda place: (place / "../.synced/code").unlink(), False),
        (lambda place: (place / "../.synced/code").write_bytes(b"train.py"), False),
    ],
)
def test_a_copy_that_changed_since_it_was_brought_starts_nothing(
    home: Path, change: Callable[[Path], object], same: bool
) -> None:
    copy = copy_of(home)
    change(home / "tpu_ops/code")
    if same:
        end(held(home, copy))
        return
    with pytest.raises(NotReady, match=r"tpu_ops/code has digest .* and no longer .*another sync") as raised:
        held(home, copy)
    assert "start again" in str(raised.value)


def test_a_copy_that_a_sync_is_changing_starts_nothing(home: Path) -> None:
    parent = os.fsencode(home / "tpu_ops")
    locks = [marks.opened(path(parent, b"code")) for path in (marks.turn_lock, marks.use_lock)]
    assert all(map(marks.take, locks))
    marks.say(locks[0], {"who": "bob@desk"})
    with pytest.raises(NotReady, match="a sync of bob@desk is replacing files"):
        held(home, copy_of(home))
    for lock in locks:
        os.close(lock or -1)


def test_no_sync_changes_a_copy_while_its_run_lasts(home: Path) -> None:
    copy = copy_of(home)
    process = held(home, copy)
    assert not sync_may_change(home), "the child has it"
    lock = copy.hold(myself())
    end(process)
    assert lock is not None
    assert not sync_may_change(home), "the supervisor has it"
    os.close(lock)
    assert sync_may_change(home)


def test_the_command_does_not_get_the_lock(home: Path) -> None:
    source, sink = os.pipe()
    process = held(home, copy_of(home), "sh", "-c", "echo on; exec sleep 60", output=sink)
    assert process.go() == ""
    os.close(sink)
    assert os.read(source, 10) == b"on\n"
    assert sync_may_change(home)
    os.kill(process.pid, 9)
    os.waitpid(process.pid, 0)
    os.close(source)


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_an_odd_file_in_place_of_a_lock_is_not_opened(home: Path, what: str) -> None:
    place = Path(os.fsdecode(marks.use_lock(os.fsencode(home / "tpu_ops"), b"code")))
    if what == "link":
        place.symlink_to(home / "elsewhere")
    else:
        os.mkfifo(place)
    end(held(home, copy_of(home)))
    assert not (home / "elsewhere").exists()


def test_a_check_that_takes_long_is_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number}.py" for number in range(20)]
    (home / "tpu_ops/.synced/code").write_bytes(b"\0".join(map(os.fsencode, names)))
    copy = copy_of(home)

    def slow(path: bytes) -> str:
        time.sleep(2 * child.LIMIT / len(names))  # stands for the disk
        return ""

    monkeypatch.setattr(child, "LIMIT", 0.5)
    monkeypatch.setattr(code, "_BEAT", 0.0)
    monkeypatch.setattr(marks, "mark", slow)
    end(held(home, copy))


@pytest.mark.parametrize(
    ("cwd", "digest", "copied"),
    [
        ("tpu_ops/code", "0123456789ab", "0123456789ab"),
        ("tpu_ops/code", "", ""),
        ("", "", ""),
        ("/srv/vision", "0" * 40, ""),
    ],
)
def test_only_what_a_sync_has_brought_has_such_a_digest(cwd: str, digest: str, copied: str) -> None:
    assert spec.copied(spec.check(good(cwd=cwd, code_digest=digest))) == copied
