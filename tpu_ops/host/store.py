"""Where runs are kept on this host: records and logs below /var/lib (they outlive a reboot), locks below /run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time

from tpu_ops.protocol.record import FINAL
from tpu_ops.protocol.spec import is_run_id
from tpu_ops.protocol.wire import encode

from . import TYPE_CHECKING, private, proc
from .intents import BESIDE, Intents
from .person import Person

if TYPE_CHECKING:
    from typing import Any, ContextManager, Dict, TextIO

#: How long the unit of an ended run may take to go, in seconds.
SETTLE_LIMIT = 5.0
_POLL = 0.02
#: Below /run: the files of the secrets of the run that is on. systemd makes it and removes it with the unit.
SECRETS = "tpu-run-secrets"
#: Earlier attempts of one run whose records and logs are kept.
KEPT_ATTEMPTS = 3
#: Ended runs whose records and logs are kept: more than any list of runs shows.
KEPT_RUNS = 50
#: What logs of ended runs may take together, in bytes: two runs that were started again and wrote all they may, and
#: less than a tenth of a TPU VM's boot disk.
KEPT_BYTES = 8 * 1024 * 1024 * 1024
#: What stands beside a record and goes with its run: an intent, and what either is written to first, which a process
#: that is killed meanwhile leaves.
_BESIDE_RECORD = re.compile(r"record\.json\.[0-9]+|{}(\.[0-9]+(\.taken)?)?".format(re.escape(BESIDE)))


class Store:
    """The directories of this host's runs.

    Args:
        root: The root of the file system; tests put another directory here.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = root
        self.run_dir = os.path.join(root, "run/tpu_ops")
        self.runs_dir = os.path.join(root, "var/lib/tpu_ops/runs")
        #: Where Ansible's modules have the locks of what must not be done at once (roles/facts/module_utils/turns.py).
        self.turns_dir = os.path.join(root, "run/tpu_ops-turns")
        self.secrets_dir = os.path.join(root, "run", SECRETS)
        self._intents = Intents(self.run_dir, self.runs_dir)
        #: Records why a run is about to be ended, and gives that: as of `Intents`.
        self.put_intent, self.take_intent = self._intents.put, self._intents.take

    def directory(self, run_id: str) -> str:
        """Return the directory of a run."""
        return os.path.join(self.runs_dir, run_id)

    def logs(self, run_id: str) -> str:
        """Return the directory of the log segments of the attempt that a run's record is of.

        Between two attempts that may be the one where the last attempt's log is set aside to.
        """
        plain = self._own_log(run_id)
        record, on_disk = self.read(run_id), _attempt(self._on_disk(run_id))
        # An attempt that the disk has not heard of has no log, and what is there is the last one's.
        elsewhere = on_disk not in (0, _attempt(record)) or (not os.path.isdir(plain) and self.is_aside(record))
        return self.log_aside(run_id, _attempt(record)) if elsewhere else plain

    def log_aside(self, run_id: str, attempt: int) -> str:
        """Return the directory of the log segments of an attempt once the next one has begun."""
        return os.path.join(self._aside(run_id, attempt), "log")

    def read_aside(self, run_id: str, attempt: int) -> dict[str, Any] | None:
        """Return the record of an attempt that was set aside, None where there is none.

        Raises:
            Damaged: It cannot be read.
        """
        return private.read(os.path.join(self._aside(run_id, attempt), "record.json"))

    def is_aside(self, record: dict[str, Any] | None) -> bool:
        """Return whether what is set aside as an attempt is what this record is of."""
        return record is not None and same_start(self.read_aside(record["run_id"], _attempt(record)), record)

    def files(self, run_id: str) -> str:
        """Return the directory of a run that its person may write to."""
        return os.path.join(self.directory(run_id), "files")

    def make(self, run_id: str) -> None:
        """Make the directory of a run, so that its record can be kept there.

        Raises:
            OSError: The disk does not take it.
        """
        private.directory(self.run_dir)
        os.makedirs(self.runs_dir, mode=0o755, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory(run_id), 0o711)

    def prepare(self, run_id: str, uid: int, gid: int) -> None:
        """Make the directories of a new run, or room for another attempt of one; the person's files stay.

        What the last attempt left is set aside when the record of the new one is written: until then there is that of
        the last. Ended runs that are too many or too large go before.

        Raises:
            OSError: The disk does not take them.
        """
        self.make(run_id)
        self.restore()
        self._prune(run_id)
        self._forget_oldest(run_id)
        if self._on_disk(run_id) is None:
            # A full disk did not take it before the host was restarted, or has lost it.
            self._set_aside(run_id, _attempt(self.read(run_id)))
            os.mkdir(self._own_log(run_id), 0o700)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.files(run_id), 0o700)
            os.chown(self.files(run_id), uid, gid)

    def _set_aside(self, run_id: str, attempt: int) -> None:
        """Move the last attempt's log below ``attempts/N``, and have its record there too, which stays where it is.

        Args:
            run_id: The run.
            attempt: N; 0 where no record tells.
        """
        log, record = self._own_log(run_id), self._records(run_id)[1]
        if not os.path.lexists(log) and not os.path.lexists(record):
            return
        folder = self._aside(run_id, attempt)
        if os.path.lexists(log) and os.path.lexists(folder):
            # Of an attempt whose record was lost, or what was interrupted here and is done again.
            _remove_tree(folder, whole=False)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.path.lexists(record):
            _remove(os.path.join(folder, "record.json"))
            os.link(record, os.path.join(folder, "record.json"))
        if os.path.lexists(log):
            os.rename(log, self.log_aside(run_id, attempt))

    def _forget_oldest(self, run_id: str) -> None:
        """Remove the oldest attempts that are set aside, so that there is room for one more."""
        parent = os.path.join(self.directory(run_id), "attempts")
        names = os.listdir(parent) if os.path.isdir(parent) else []
        kept = sorted((name for name in names if name.isdigit()), key=int)
        for name in kept[: max(0, len(kept) + 1 - KEPT_ATTEMPTS)]:
            _remove_tree(os.path.join(parent, name))

    def _own_log(self, run_id: str) -> str:
        """Return the directory of the log of the attempt that the record on the disk is of."""
        return os.path.join(self.directory(run_id), "log")

    def _aside(self, run_id: str, attempt: int) -> str:
        """Return the directory of an attempt that is set aside."""
        return os.path.join(self.directory(run_id), "attempts", str(attempt))

    def _prune(self, current: str) -> None:
        """Remove ended runs beyond the newest few; of one whose person has left files, the logs alone.

        What has no record is nobody's to look up, and goes as well.
        """
        for run_id in self._without_record():
            if run_id != current:
                self._drop(run_id)
        size = 0
        ended = (record for record in self.recent() if record["state"] in FINAL and record["run_id"] != current)
        for number, record in enumerate(ended, 1):
            size += sum(map(_size, self._kept_logs(record["run_id"])))
            if number > KEPT_RUNS or size > KEPT_BYTES:
                self._drop(record["run_id"])

    def _drop(self, run_id: str) -> None:
        for path in self._kept_logs(run_id):
            _remove_tree(path, whole=False)
        with contextlib.suppress(OSError):
            if os.path.isdir(self.files(run_id)):
                os.rmdir(self.files(run_id))
            # The record last, and only where all else has gone: while it is there, this is done again.
            for name in filter(_BESIDE_RECORD.fullmatch, os.listdir(self.directory(run_id))):
                _remove(os.path.join(self.directory(run_id), name))
            if set(os.listdir(self.directory(run_id))) <= {"record.json"}:
                for path in (*self._records(run_id), self._changes(run_id)):
                    _remove(path)
                os.rmdir(self.directory(run_id))

    def _kept_logs(self, run_id: str) -> list[str]:
        """Return where the logs of a run's attempts are."""
        return [os.path.join(self.directory(run_id), name) for name in ("log", "attempts")]

    def _without_record(self) -> list[str]:
        """Return the directories of runs that have no record at all, readable or not."""
        return [
            name
            for name in os.listdir(self.runs_dir)
            if is_run_id(name)
            and os.path.isdir(self.directory(name))
            and not any(map(os.path.lexists, self._records(name)))
        ]

    def _records(self, run_id: str) -> tuple[str, str]:
        """Return where a run's record stands: in memory while the disk does not take it, and on the disk."""
        return os.path.join(self.run_dir, "records", run_id + ".json"), os.path.join(
            self.directory(run_id), "record.json"
        )

    def changing(self, run_id: str, *, anyway: bool = False, limit: float = private.LOCK_LIMIT) -> ContextManager[None]:
        """Keep others from setting a run's record aside, or from adding to it once that has ended, while this lasts.

        Each run has a lock of its own: whoever stops one may have that request stand still for good, as any process
        that they start, and is to be in the way of no other's.

        Args:
            run_id: The run.
            anyway: Where somebody else does not let go of it, go on all the same.
            limit: How long that is waited for at most, in seconds; no longer than `private.LOCK_LIMIT`.

        Raises:
            Refused: Somebody else does not let go of it.
        """
        private.directory(self.run_dir, "changes")
        return private.locked(self._changes(run_id), anyway=anyway, limit=limit)

    def _changes(self, run_id: str) -> str:
        """Return the file that is locked while a run's record is changed."""
        return os.path.join(self.run_dir, "changes", run_id)

    def write(self, record: dict[str, Any]) -> None:
        """Write a run's record to the disk; a reader sees the old one or the new one, never a part.

        Raises:
            OSError: The disk does not take it.
        """
        self.to_disk(record)
        self.forget_in_memory(record["run_id"])

    def to_disk(self, record: dict[str, Any]) -> None:
        """Write a run's record to the disk, where one in memory goes on to count before it.

        In the place of an earlier attempt's, that one is set aside with its log.

        Raises:
            OSError: The disk does not take it.
        """
        run_id = record["run_id"]
        path = self._records(run_id)[1]
        earlier = self._on_disk(run_id)
        if earlier is None or not _is_later(record, earlier):
            private.write(path, record)
            return
        # As late as can be: until the record is replaced, whoever follows the last attempt reads its log.
        private.write(path, record, lambda: self._set_aside(run_id, _attempt(earlier)))
        os.mkdir(self._own_log(run_id), 0o700)

    def forget_in_memory(self, run_id: str) -> None:
        """Let the record on the disk count."""
        _remove(self._records(run_id)[0])

    def save(self, record: dict[str, Any]) -> str:
        """Write a run's record, to memory where the disk does not take it; return what is wrong with the disk."""
        try:
            self.write(record)
        except OSError as exc:
            self.remember(record)
            return exc.strerror or str(exc)
        return ""

    def remember(self, record: dict[str, Any]) -> None:
        """Write a run's record to memory, where it stands for that on the disk until the next one is written there."""
        in_memory, _ = self._records(record["run_id"])
        with contextlib.suppress(OSError):
            private.directory(self.run_dir, "records")
            private.write(in_memory, record)

    def restore(self) -> None:
        """Write to the disk what it did not take before; a run that it has never heard of is forgotten."""
        for run_id in self._in_memory():
            with contextlib.suppress(OSError, private.Damaged):
                record = self.read(run_id)
                if record is not None and os.path.isdir(self.directory(run_id)):
                    self.write(record)
                else:
                    _remove(self._records(run_id)[0])

    def _in_memory(self) -> list[str]:
        """Return the runs whose newest record is not on the disk."""
        try:
            names = os.listdir(os.path.join(self.run_dir, "records"))
        except FileNotFoundError:
            return []
        return [name[: -len(".json")] for name in names if name.endswith(".json")]

    def read(self, run_id: str) -> dict[str, Any] | None:
        """Return a run's record, or None where this host has never heard of it.

        Raises:
            Damaged: There is one, and it cannot be read.
        """
        found = (self._checked(run_id, path) for path in self._records(run_id))
        return next((record for record in found if record is not None), None)

    def _checked(self, run_id: str, path: str) -> dict[str, Any] | None:
        """Return the record of a run in a file, None where there is no file.

        Raises:
            Damaged: The file does not hold one.
        """
        try:
            return private.read(path, lambda record: _is_record(record, run_id))
        except private.Damaged as damage:
            if (self.holder() or {}).get("run_id") == run_id:
                damage.fix = (
                    "the run is active: `sudo systemctl stop tpu-run.service` on this worker ends it and has its "
                    "record written again"
                )
            elif path == self._records(run_id)[1]:
                fix = "`sudo mv {} /var/tmp/` on this worker keeps its log and files, and frees the run's name"
                damage.fix = fix.format(self.directory(run_id))
            raise

    def _on_disk(self, run_id: str) -> dict[str, Any] | None:
        """Return a run's record as the disk has it, or None where it has none that can be read: it is replaced then."""
        with contextlib.suppress(private.Damaged):
            return private.read(self._records(run_id)[1])
        return None

    def observe(self, run_id: str) -> dict[str, Any] | None:
        """Return a run's record with the state that holds now: what died without a word is lost, not running.

        Raises:
            Damaged: As for `read`.
        """
        record = self.read(run_id)
        if record is None or record["state"] in FINAL:
            return record
        if not self.of_this_boot(record):
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(proc.started_at(1)))
            return dict(record, state="lost", reason="the host was restarted at {} while the run was active".format(at))
        supervisor = record["supervisor"]
        if proc.start_time(supervisor["pid"]) != supervisor["start"]:
            return dict(record, state="lost", reason="the supervisor ended without a final record")
        return record

    def settled(self, record: dict[str, Any]) -> bool:
        """Return whether nothing of an ended run is left: the unit's control group goes as the last thing.

        Where another run is on, it is that one's: all have the same.
        """
        if not record.get("cgroup") or not os.path.isdir(record["cgroup"]):
            return True
        holder = self.holder()
        return holder is not None and holder["supervisor"] != record["supervisor"]

    def settle(self, record: dict[str, Any], limit: float = SETTLE_LIMIT) -> None:
        """Wait so many seconds until the unit of an ended run is gone too: who hears of the end may start the next."""
        deadline = time.monotonic() + limit
        while not self.settled(record) and time.monotonic() < deadline:
            time.sleep(_POLL)

    @staticmethod
    def boot() -> tuple[str, int]:
        """Return what distinguishes this boot of this host from every other."""
        return proc.boot_id(), proc.start_time(1)

    def of_this_boot(self, record: dict[str, Any]) -> bool:
        """Return whether a run began since this host was started."""
        return (record["boot_id"], record["init_start"]) == self.boot()

    def recent(self, count: int | None = None) -> list[dict[str, Any]]:
        """Return the records of the newest runs, or of all, newest first. Damaged ones are left out."""
        return self.survey()[0][:count]

    def survey(self) -> tuple[list[dict[str, Any]], list[private.Damaged]]:
        """Return the records of all runs, newest first, and what is wrong with those that are damaged."""
        names = set(self._in_memory())
        with contextlib.suppress(FileNotFoundError):
            names.update(os.listdir(self.runs_dir))
        records, damages = [], []
        for name in sorted(names):
            try:
                record = self.observe(name)
            except private.Damaged as damage:
                damages.append(damage)
            else:
                records += [record] if record else []
        records.sort(key=lambda record: -float(record["since"]))
        return records, damages

    # --- the lock: whoever holds it is the run of this host -------------------------------------------------

    def lock(self, holder: dict[str, Any]) -> TextIO | None:
        """Take this host's run lock and name its holder in it; return None where another run has it.

        The lock goes with the returned file, at the latest with the process.
        """
        private.directory(self.run_dir)
        file = private.opened(self._lock_path())  # kept open, it is the lock
        if not private.take(file):
            file.close()
            return None
        file.truncate(0)
        json.dump(holder, file, sort_keys=True)
        file.flush()
        return file

    def holder(self) -> dict[str, Any] | None:
        """Return who has this host's run lock now, as `rank_record.holder_of` describes them.

        The lock itself is left alone: asking must never be in the way of a supervisor that takes it.
        """
        try:
            data = private.read(self._lock_path())
            supervisor = (data or {})["supervisor"]
            alive = proc.start_time(supervisor["pid"]) == supervisor["start"]
        except (private.Damaged, KeyError, TypeError):
            return None  # before the first run, or while a supervisor is about to name itself there
        return data if alive else None

    def _lock_path(self) -> str:
        return os.path.join(self.run_dir, "lock")

    # --- secrets: files of the person for as long as the run is on ------------------------------------------

    def put_secrets(self, secrets: Dict[str, str], person: Person) -> Dict[str, str]:
        """Write each secret to a file that this person alone may read, and return the variables that tell of it.

        What another run may have left goes first. Root keeps the directory, so that nobody puts anything of their
        own in the way.

        Returns:
            For each secret NAME its value, and as NAME_FILE where it stands.
        """
        variables = {}
        self.drop_secrets()
        os.makedirs(self.secrets_dir, mode=0o711, exist_ok=True)
        for name, value in secrets.items():
            path = os.path.join(self.secrets_dir, name)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                os.fchown(file.fileno(), person.uid, person.gid)
                file.write(encode(value))
            variables.update({name: value, name + "_FILE": path})
        return variables

    def drop_secrets(self) -> None:
        """Remove the files of all secrets."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.secrets_dir):
                os.unlink(os.path.join(self.secrets_dir, name))


def _is_record(record: dict[str, Any], run_id: str) -> bool:
    """Return whether a JSON object is the record of a run."""
    return record.get("run_id") == run_id and isinstance(record.get("state"), str)


def _attempt(record: dict[str, Any] | None) -> int:
    """Return which attempt a record is of; 0 where there is none, or it does not tell."""
    return int((record or {}).get("attempt", 0))


def same_start(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Return whether two records are of the same attempt, which may have been started twice, and of the same start."""
    if one is None or other is None:
        return False
    return (_attempt(one), one.get("supervisor")) == (_attempt(other), other.get("supervisor"))


def _is_later(record: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Return whether a record is of a later attempt than another, or of the same one that was started twice."""
    return not same_start(record, earlier) and _attempt(record) >= _attempt(earlier)


def _remove(path: str) -> None:
    """Remove a file that may be gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _remove_tree(path: str, *, whole: bool = True) -> None:
    """Remove a directory with all it holds; where not the whole of it has to go, as much as can be removed."""
    import shutil  # requests do without it

    shutil.rmtree(path, ignore_errors=not whole)


def _size(folder: str) -> int:
    """Return the bytes of all files below a directory."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(parent, name)).st_size
    return found
