"""Bringing a tree to workers whose homes are directories here: the real rsync, and what runs on workers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpu_ops.cli import main
from tpu_ops.errors import HostError, OpsError
from tpu_ops.protocol import marks
from tpu_ops.runs import sync, synced, turns
from tpu_ops.ssh import processes
from tpu_ops.ssh.replies import Result

HOSTS = ("w0", "w1")


class Workers:
    """Workers whose homes stand side by side; `steps` has who was asked, `limits` for how long."""

    ssh_config = Path("/unused")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[tuple[str, ...]] = []
        self.limits: list[float] = []
        for host in HOSTS:
            (folder / host).mkdir(exist_ok=True)

    @contextlib.asynccontextmanager
    async def attended(self, host: str, argv: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
        async with processes.started(["env", "-C", str(self.folder / host), sys.executable, *argv[1:]]) as process:
            yield process

    async def run(
        self, hosts: Sequence[str], argv: Sequence[str], *, limit: float, stdin: bytes
    ) -> Mapping[str, Result]:
        self.limits.append(limit)
        self.steps.append(tuple(hosts))
        found = {}
        for host in hosts:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *argv[1:], cwd=self.folder / host, stdin=-1, stdout=-1, stderr=-1
            )
            stdout, stderr = await process.communicate(stdin)
            found[host] = Result(host, process.returncode, stdout, stderr)
        return found

    def there(self, host: str = "w0") -> Path:
        return self.folder / host / "tpu_ops" / "digits"


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    (tmp_path / "homes").mkdir()
    made, command = Workers(tmp_path / "homes"), sync.transfer_command

    def local(tree: sync.Tree, host: str, ssh_config: Path) -> list[str]:
        words = [word for word in command(tree, host, ssh_config) if not word.startswith("--rsh")]
        return [*words[:-1], f"{made.there(host)}/"]

    monkeypatch.setattr(sync, "transfer_command", local)
    return made


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    (folder / "sub").mkdir(parents=True)
    (folder / "train.py").write_text("x")
    (folder / "sub" / "part.py").write_text("y")
    (folder / "link").symlink_to("train.py")
    (folder / os.fsdecode(b"\xff # odd")).write_text("z")
    return folder


async def push(workers: Workers, code: Path) -> dict[str, sync.Seen]:
    fanout: Any = workers
    return await sync.push(fanout, HOSTS, sync.read(code), turns.Turn("digits"))


async def test_a_copy_tells_the_bytes_of_each_worker_and_its_end(workers: Workers, code: Path) -> None:
    told: list[tuple[str, int, int, bool]] = []
    fanout: Any = workers
    (code / "weights.bin").write_bytes(os.urandom(3_000_000))
    tree = sync.read(code)
    await sync.push(fanout, HOSTS, tree, turns.Turn("digits"), lambda *one: told.append(one))
    total = sum((code / entry).stat().st_size for entry in tree.files)
    for host in HOSTS:
        (begun, *between, end) = [one for one in told if one[0] == host]
        assert (begun[1], begun[3], end[1:]) == (0, False, (end[2], end[2], True))
        assert end[2] >= total
        assert 3_000_000 < max(size for _, size, _, _ in between) <= end[2]
    await sync.push(fanout, HOSTS, tree, turns.Turn("digits"), lambda *_: pytest.fail("nothing is to be copied"))


def names(place: Path) -> list[str]:
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir())


async def test_the_same_tree_is_everywhere_and_a_second_time_nothing_is_done(workers: Workers, code: Path) -> None:
    await push(workers, code)
    for host in HOSTS:
        assert names(workers.there(host)) == names(code)
        assert (workers.there(host) / "link").is_symlink()
    workers.steps.clear()
    seen = await push(workers, code)
    assert workers.steps == [HOSTS], "one look"
    assert seen["w0"] == sync.Seen((), (), (), True)


@pytest.fixture
def spaced(code: Path) -> Path:
    return code.rename(code.with_name(" digits"))


async def test_rsync_takes_a_directory_whose_name_has_a_space(workers: Workers, spaced: Path) -> None:
    await push(workers, spaced)
    assert names(workers.there()) == names(spaced)


async def test_the_list_of_a_large_tree_has_the_time_that_a_slow_uplink_takes(workers: Workers, code: Path) -> None:
    for number in range(2000):
        (code / f"sample-{number}.py").touch()
    await push(workers, code)
    sent = len(HOSTS) * 2000 * len('"sample-1000.py": "f", ' + 64 * "0")
    assert min(workers.limits) > sync._STEP_LIMIT + sent / sync._UPLINK
    assert max(workers.limits) < sync._STEP_LIMIT + 2 * sent / sync._UPLINK


@pytest.mark.parametrize(
    ("df", "said"),
    [
        (
            b"Filesystem 1024-blocks Used Available Capacity Mounted on\ntmpfs 2048 100 1948 5% /home/ada\n",
            "w1 has 2.0 MB",
        ),
        (b"df: .: Stale file handle\n", "its free space is unknown"),
    ],
)
async def test_a_worker_whose_disk_is_full_is_named_with_what_is_free_there(
    workers: Workers, code: Path, monkeypatch: pytest.MonkeyPatch, df: bytes, said: str
) -> None:
    """rsync's last words are of a broken pipe."""
    words = b"rsync: write failed on x: No space left on device (28)\nrsync: [sender] write error: Broken pipe (32)\n"
    plain, looked = sync._transfer, workers.run

    async def full(fanout: Any, host: str, *given: Any, **held: Any) -> Result:
        done = await plain(fanout, host, *given, **held)
        return Result(host, 11, stderr=words, problem="Broken pipe (32)") if host == "w1" else done

    async def run(hosts: Sequence[str], argv: Sequence[str], **options: Any) -> Mapping[str, Result]:
        if argv[0] == "/bin/sh":
            return {host: Result(host, 0, df) for host in hosts}
        return await looked(hosts, argv, **options)

    monkeypatch.setattr(sync, "_transfer", full)
    monkeypatch.setattr(workers, "run", run)
    with pytest.raises(HostError, match=f"disk is full that ~/tpu_ops/digits is on: {said}") as wrong:
        await push(workers, code)
    assert (wrong.value.where, "digits/.gitignore" in wrong.value.fix) == ("w1", True)


async def test_a_quota_that_is_used_up_is_no_full_disk(
    workers: Workers, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = b"rsync: write failed on x: Disk quota exceeded (122)\n"

    async def full(_: Any, host: str, *given: Any, **held: Any) -> Result:
        return Result(host, 11, stderr=words, problem="Disk quota exceeded (122)")

    looked = workers.run

    async def run(hosts: Sequence[str], argv: Sequence[str], **options: Any) -> Mapping[str, Result]:
        return (
            {host: Result(host, 1) for host in hosts} if argv[0] == "/bin/sh" else await looked(hosts, argv, **options)
        )

    monkeypatch.setattr(sync, "_transfer", full)
    monkeypatch.setattr(workers, "run", run)
    with pytest.raises(HostError, match="your quota is used up on the disk that ~/tpu_ops/digits is on: ") as wrong:
        await push(workers, code)
    assert "df -i ~/tpu_ops" in wrong.value.fix


async def test_the_time_limit_of_a_copy_grows_with_its_size(
    workers: Workers, code: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (code / "weights.bin").open("wb") as sparse:
        sparse.truncate(60 * 10**6)
    limits, plain = [], sync._transfer

    async def slow(fanout: Any, host: str, tree: sync.Tree, entries: Any, limit: float, **held: Any) -> Result:
        limits.append(limit)
        return await plain(fanout, host, tree, entries, 0.05, **held)

    monkeypatch.setattr(sync, "_transfer", slow)
    monkeypatch.setattr(sync, "transfer_command", lambda *_: ["sleep", "60"])
    with caplog.at_level("INFO"), pytest.raises(HostError, match="the tree did not arrive within") as wrong:
        await push(workers, code)
    assert limits == [pytest.approx(sync.LIMIT + len(HOSTS) * 60 * 10**6 / sync._UPLINK, rel=0.01)] * len(HOSTS)
    assert "files that have arrived are not sent again" in wrong.value.fix
    assert "copying up to 60 MB to each of 2 workers, 120 MB in all" in caplog.text


def alone(workers: Workers, name: str = "digits", *, force: bool = False) -> Any:
    fanout: Any = workers
    return turns.alone(fanout, HOSTS, name, force=force)


async def test_of_two_syncs_of_one_name_the_second_is_refused_and_told_who(workers: Workers) -> None:
    async with alone(workers), alone(workers, "other"):
        for force in (False, True):
            with pytest.raises(HostError, match=r"copying digits there, or starting a run .*: \w+@.* since ") as wrong:
                async with alone(workers, force=force):
                    pytest.fail("both are let in")
            assert wrong.value.where == "w0"
    async with alone(workers):
        pass


async def test_workers_that_share_a_home_are_locked_by_one_command(workers: Workers, code: Path) -> None:
    (workers.folder / "w1").rmdir()
    (workers.folder / "w1").symlink_to("w0")
    fanout: Any = workers
    async with alone(workers) as turn:
        await sync.push(fanout, HOSTS, sync.read(code), turn)
        with pytest.raises(HostError, match="another command is copying"):
            async with alone(workers):
                pytest.fail("both are let in")


async def test_a_killed_sync_keeps_others_out_while_its_rsync_copies(workers: Workers, code: Path) -> None:
    wrote = workers.folder / "copying"
    program = "import sys; from tests.runs.test_sync import stuck; stuck(*sys.argv[1:])"
    command = [sys.executable, "-c", program, str(workers.folder), str(code), str(wrote)]
    killed = await asyncio.create_subprocess_exec(*command)
    while not wrote.exists() or len(wrote.read_text().split()) < len(HOSTS):
        assert killed.returncode is None
        await asyncio.sleep(0.02)  # until it copies to both
    killed.kill()
    await killed.wait()
    with pytest.raises(HostError, match="another command is copying"):
        async with alone(workers):
            pytest.fail("it is let in")
    for pid in wrote.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(HostError):
                async with alone(workers):
                    return


def stuck(folder: str, code: str, wrote: str) -> None:
    """Copy a directory to workers by an rsync that never ends and writes its pid."""
    workers = Workers(Path(folder))
    copying = ["/bin/sh", "-c", f"echo $$ >>{wrote}; exec sleep 60"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "transfer_command", lambda *_: copying)
        asyncio.run(_copy(workers, Path(code)))


async def _copy(workers: Workers, code: Path) -> None:
    fanout: Any = workers
    async with alone(workers) as turn:
        await sync.push(fanout, HOSTS, sync.read(code), turn)


def used_by_a_run(workers: Workers, host: str) -> int:
    """Lock a worker's directory as a run does."""
    lock = marks.opened(marks.use_lock(os.fsencode(workers.folder / host / "tpu_ops"), b"digits"))
    assert lock is not None
    assert marks.take(lock, shared=True)
    marks.say(lock, {"run_id": "exp", "person": "bob"})
    return lock


async def test_files_that_a_run_uses_are_replaced_by_force_alone(
    workers: Workers, code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fanout: Any = workers
    await push(workers, code)
    lock = used_by_a_run(workers, "w1")
    async with alone(workers) as turn:
        assert (await sync.push(fanout, HOSTS, sync.read(code), turn))["w1"].differs == (), "nothing differs"
    (code / "train.py").write_text("newer")
    async with alone(workers) as turn:
        with pytest.raises(HostError, match=r"run exp of bob uses ~/tpu_ops/digits \(") as wrong:
            await sync.push(fanout, HOSTS, sync.read(code), turn)
    assert (wrong.value.where, "`tpu_ops stop exp`" in wrong.value.fix) == ("w1", True)
    assert [(workers.there(host) / "train.py").read_text() for host in HOSTS] == ["x", "x"]
    async with alone(workers, force=True) as turn:
        await sync.push(fanout, HOSTS, sync.read(code), turn)
    assert "w1: run exp of bob uses ~/tpu_ops/digits" in caplog.text
    assert (workers.there("w1") / "train.py").read_text() == "newer"
    os.close(lock)


async def test_files_that_a_run_wrote_are_neither_removed_nor_overwritten(workers: Workers, code: Path) -> None:
    await push(workers, code)
    mine = workers.there("w1") / "results.txt"
    mine.write_text("of the run")
    (workers.there("w1") / "out").mkdir()
    (code / "train.py").write_text("newer")
    await push(workers, code)
    for entry in ("results.txt", "out"):
        (code / entry).write_text("of the desk")
    workers.steps.clear()
    with pytest.raises(HostError, match=r"out, results\.txt in ~/tpu_ops/digits differs from yours") as wrong:
        await push(workers, code)
    assert (wrong.value.where, ".gitignore" in wrong.value.fix, len(workers.steps)) == ("w1", True, 1)
    assert mine.read_text() == "of the run"
    assert not (workers.there("w0") / "results.txt").exists(), "nothing was brought anywhere"
    mine.write_text("of the desk")
    (workers.there("w1") / "out").rmdir()
    await push(workers, code)


async def test_a_link_of_the_person_in_the_place_of_a_directory_stays(workers: Workers, code: Path) -> None:
    disk = workers.folder / "disk"
    disk.mkdir()
    (disk / "part.py").write_text("of the disk")
    workers.there().mkdir(parents=True)
    (workers.there() / "sub").symlink_to(disk)
    with pytest.raises(HostError, match="sub in ~/tpu_ops/digits differs"):
        await push(workers, code)
    assert (disk / "part.py").read_text() == "of the disk"


async def test_only_what_an_earlier_sync_put_there_goes(workers: Workers, code: Path) -> None:
    await push(workers, code)
    outside = workers.folder / "w0" / "outside.py"
    outside.write_text("")
    manifest = workers.folder / "w0" / "tpu_ops" / ".synced" / "digits"
    manifest.write_bytes(manifest.read_bytes() + b"\0../../outside.py\0" + os.fsencode(outside) + b"\0gone.py")
    (workers.there() / "notes.txt").write_text("")
    (code / "sub" / "part.py").unlink()
    (code / "link").unlink()
    (code / "link").mkdir()
    (code / "link" / "now.py").write_text("a directory")
    seen = await push(workers, code)
    assert seen["w0"].stale == ("link", "sub/part.py")
    assert names(workers.there()) == sorted([*names(code), "notes.txt"])
    assert outside.exists()


@pytest.mark.parametrize("link", [False, True])
async def test_a_synced_directory_can_be_replaced_by_a_file_or_a_link(workers: Workers, code: Path, link: bool) -> None:
    (code / "sub" / "deep").mkdir()
    (code / "sub" / "deep" / "one.py").write_text("1")
    await push(workers, code)
    shutil.rmtree(code / "sub")
    if link:
        (code / "sub").symlink_to("train.py")
    else:
        (code / "sub").write_text("a file now")
    mine = workers.there() / "sub" / "mine.txt"
    mine.write_text("of the run")
    with pytest.raises(HostError, match="sub in ~/tpu_ops/digits differs"):
        await push(workers, code)
    mine.unlink()
    await push(workers, code)
    assert names(workers.there()) == names(code)
    assert (workers.there() / "sub").is_symlink() is link


async def test_a_link_that_becomes_a_directory_goes_whatever_it_leads_to(workers: Workers, code: Path) -> None:
    (code / "same").symlink_to("sub")
    (code / "loop").symlink_to("loop")
    await push(workers, code)
    for name, text in (("same", "y"), ("loop", "z")):
        (code / name).unlink()
        (code / name).mkdir()
        (code / name / "part.py").write_text(text)
    await push(workers, code)
    assert names(workers.there()) == names(code)
    assert not (workers.there() / "same").is_symlink()


async def test_a_directory_goes_with_the_last_file_that_was_brought_there(workers: Workers, code: Path) -> None:
    """An empty directory could be imported as a package, and would block a file of its name."""
    for place in ("old/deep", "shared"):
        (code / place).mkdir(parents=True)
        (code / place / "part.py").write_text("v1")
    await push(workers, code)
    (workers.there() / "shared" / "results.txt").write_text("of the run")
    for place in ("old", "shared"):
        shutil.rmtree(code / place)
    await push(workers, code)
    assert not (workers.there() / "old").exists()
    assert [path.name for path in (workers.there() / "shared").iterdir()] == ["results.txt"]
    (code / "old").write_text("v2")
    await push(workers, code)
    assert (workers.there() / "old").read_text() == "v2"


def test_synced_files_are_removed_from_a_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, unlink = tmp_path / "kept", os.unlink
    folder.mkdir(mode=0o555)
    (folder / "old.py").write_text("")

    def refused(path: Any) -> None:
        """Refuse root what the person would be."""
        if not Path(os.fsdecode(path)).parent.stat().st_mode & stat.S_IWUSR:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refused)
    synced._remove(os.fsencode(folder / "old.py"))
    assert (list(folder.iterdir()), stat.S_IMODE(folder.stat().st_mode)) == ([], 0o555)


async def test_files_of_a_failed_push_are_removed_by_the_next_one(workers: Workers, code: Path) -> None:
    (code / "extra.py").write_text("v1")
    transfer = sync._transfer

    async def cut(fanout: Any, host: str, tree: sync.Tree, entries: Any, limit: float, **held: Any) -> Result:
        done = await transfer(fanout, host, tree, entries, limit, **held)
        return Result(host, None, problem="no route to host", reached=False) if host == "w1" else done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "_transfer", cut)
        with pytest.raises(OpsError, match="no route"):
            await push(workers, code)
    assert (workers.there() / "extra.py").exists()
    (code / "train.py").write_text("newer")
    (code / "extra.py").unlink()
    await push(workers, code)
    assert names(workers.there()) == names(workers.there("w1")) == names(code)


async def test_a_file_that_is_saved_while_the_tree_is_brought_ends_it_and_is_named(
    workers: Workers, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = sync._transfer

    async def saved(fanout: Any, host: str, tree: sync.Tree, entries: Any, limit: float, **held: Any) -> Result:
        if host == "w1":
            (code / "train.py").write_text("saved")
        return await transfer(fanout, host, tree, entries, limit, **held)

    monkeypatch.setattr(sync, "_transfer", saved)
    monkeypatch.setattr(sync, "WIDTH", 1)
    with pytest.raises(HostError, match=r"train\.py in ~/tpu_ops/digits differs from what was read here") as wrong:
        await push(workers, code)
    assert wrong.value.where == "w1"


async def test_a_file_of_the_same_size_and_time_but_another_content_is_brought(workers: Workers, code: Path) -> None:
    await push(workers, code)
    there = workers.there("w1") / "train.py"
    before = there.stat()
    there.write_text("?")
    os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))
    await push(workers, code)
    assert there.read_text() == "x"


async def test_a_worker_that_cannot_take_it_is_named_with_the_reason(workers: Workers, code: Path) -> None:
    (workers.folder / "w1" / "tpu_ops").write_text("a file")
    with pytest.raises(HostError, match=r"tpu_ops/\.synced/digits: Not a directory") as wrong:
        await push(workers, code)
    assert wrong.value.where == "w1"


@pytest.mark.parametrize("said", [b"%s\nof the shell's start-up files, late\n", b'so early: {"\n%s', b"[]\n%s"])
async def test_other_output_around_a_workers_answer_is_ignored(
    workers: Workers, code: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    asked = workers.run

    async def beside(*arguments: Any, **options: Any) -> Mapping[str, Result]:
        found = await asked(*arguments, **options)
        return {host: one._replace(stdout=said % one.stdout) for host, one in found.items()}

    monkeypatch.setattr(workers, "run", beside)
    await push(workers, code)
    assert names(workers.there()) == names(code)


async def test_a_worker_that_gives_no_answer_is_named(
    workers: Workers, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mute(hosts: Sequence[str], *_: Any, **__: Any) -> Mapping[str, Result]:
        return {host: Result(host, 0, b"Welcome\n") for host in hosts}

    monkeypatch.setattr(workers, "run", mute)
    with pytest.raises(HostError, match="no answer came from the program") as wrong:
        await push(workers, code)
    assert wrong.value.where == "w[0-1]"


def test_sync_says_what_it_would_bring_and_then_brings_it(
    workers: Workers, code: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    chosen = [SimpleNamespace(host=host, label="w") for host in HOSTS]
    fleet = SimpleNamespace(settings=SimpleNamespace(state_dir=workers.folder / "state"))
    monkeypatch.setattr("tpu_ops.cli.sync.config.load", lambda _: None)
    monkeypatch.setattr("tpu_ops.cli.sync.contact.find", lambda *_: (None, chosen))
    monkeypatch.setattr("tpu_ops.cli.sync.contact.serving", lambda *_: fleet)
    monkeypatch.setattr("tpu_ops.cli.sync.contact.fanout", lambda _: workers)
    monkeypatch.setattr("tpu_ops.cli.sync.contact.out_of_reach", lambda *_: {})

    def told(*words: str) -> str:
        assert main.main(["sync", "pod", str(code), *words]) == 0
        return str(capsys.readouterr().out)

    assert told("--dry-run") == "w[0-1]: to copy: link, sub, sub/part.py, train.py, \\udcff # odd\n"
    assert not workers.there().exists()
    everything = json.loads(told("--json"))
    assert everything["workers"]["w1"]["copied"][:2] == ["link", "sub"]
    assert (everything["files"], everything["code_digest"]) == (4, sync.read(code).digest)
    (code / "link").unlink()
    (workers.there("w0") / "train.py").write_text("other")
    assert told("--dry-run") == "w0: to copy: train.py\nw0: to remove: link\nw1: to remove: link\n"
    assert told() == "w0: copied: train.py\nw0: removed: link\nw1: removed: link\n"
    assert told() == "w[0-1]: nothing differs\n"
    assert main.main(["sync", "pod", str(code / "none")]) == 2
