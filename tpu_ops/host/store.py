"""Stores the runs of this host: records and logs below /var/lib, which survive a reboot, and locks below /run."""

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

#: Seconds to wait until the systemd unit of an ended run is gone.
SETTLE_LIMIT = 5.0
_POLL = 0.02
#: Directory below /run for the secrets of the active run. systemd creates and removes the directory with the unit.
SECRETS = "tpu-run-secrets"
#: Number of earlier attempts of a run whose records and logs are kept.
KEPT_ATTEMPTS = 3
#: Number of ended runs whose records and logs are kept: more than commands show in a list.
KEPT_RUNS = 50
#: Maximum total size of the logs of ended runs, in bytes: enough for two recovered runs with logs of maximum size, and
#: less than a tenth of a TPU VM's boot disk.
KEPT_BYTES = 8 * 1024 * 1024 * 1024
#: Files of an attempt that the supervisor writes beside the log (see `watch`), and that are set aside with it.
BESIDE_LOG = WATCH, HISTORY = ("watch.json", "history.jsonl")
#: Files beside a record that are removed with the run: the intent, those beside the log, and temporary files of all
#: these that a killed process left behind.
_BESIDE_RECORD = re.compile(
    r"record\.json\.[0-9]+|{}(\.[0-9]+(\.taken)?)?|({})(\.[0-9]+)?".format(
        re.escape(BESIDE), "|".join(map(re.escape, BESIDE_LOG))
    )
)


class Store:
    """The directories of this host's runs.

    Args:
        root: The root of the file system; tests use another directory.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = root
        self.run_dir = os.path.join(root, "run/tpu_ops")
        self.runs_dir = os.path.join(root, "var/lib/tpu_ops/runs")
        #: Directory of the locks by which Ansible's modules exclude each other (roles/facts/module_utils/turns.py).
        self.turns_dir = os.path.join(root, "run/tpu_ops-turns")
        self.secrets_dir = os.path.join(root, "run", SECRETS)
        #: File that tells the run's command, once it gets SIGTERM, why. Names of secrets have no dots.
        self.reason_file = os.path.join(self.secrets_dir, "reason.json")
        self._intents = Intents(self.run_dir, self.runs_dir)
        #: Functions that store and take the intent to end a run; see `Intents`.
        self.put_intent, self.take_intent = self._intents.put, self._intents.take

    def directory(self, run_id: str) -> str:
        """Return the directory of a run."""
        return os.path.join(self.runs_dir, run_id)

    def logs(self, run_id: str) -> str:
        """Return the directory of the log segments of the attempt in a run's record.

        Between two attempts, the result can be the directory to which the last attempt's log was moved.
        """
        plain = self._own_log(run_id)
        record, on_disk = self.read(run_id), _attempt(self._on_disk(run_id))
        # If the record of an attempt is not on the disk, the log on the disk is that of the attempt before.
        elsewhere = on_disk not in (0, _attempt(record)) or (not os.path.isdir(plain) and self.is_aside(record))
        return self.log_aside(run_id, _attempt(record)) if elsewhere else plain

    def log_aside(self, run_id: str, attempt: int) -> str:
        """Return the directory to which an attempt's log segments are moved when the next attempt begins."""
        return os.path.join(self._aside(run_id, attempt), "log")

    def read_aside(self, run_id: str, attempt: int) -> dict[str, Any] | None:
        """Return the record of an attempt that was set aside; None if no such record exists."""
        return private.read(os.path.join(self._aside(run_id, attempt), "record.json"))

    def is_aside(self, record: dict[str, Any] | None) -> bool:
        """Return whether the record of the same start was set aside: a later start has replaced it."""
        return record is not None and same_start(self.read_aside(record["run_id"], _attempt(record)), record)

    def files(self, run_id: str) -> str:
        """Return the directory of a run that its user can write to."""
        return os.path.join(self.directory(run_id), "files")

    def watch(self, run_id: str, aside: int = 0) -> dict[str, Any] | None:
        """Return what the supervisor of a run's last attempt has noted last (`protocol.watch`); None if unknown.

        Args:
            run_id: The run.
            aside: The number of an attempt that was set aside, instead of the last one.
        """
        with contextlib.suppress(private.Damaged):
            return private.read(os.path.join(self._aside(run_id, aside) if aside else self.directory(run_id), WATCH))
        return None

    def make(self, run_id: str) -> None:
        """Create the directory of a run, for its record.

        Raises:
            OSError: The directory cannot be created.
        """
        private.directory(self.run_dir)
        os.makedirs(self.runs_dir, mode=0o755, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory(run_id), 0o711)

    def prepare(self, run_id: str, uid: int, gid: int) -> None:
        """Create the directories of a new run, or prepare for another attempt. The user's files are kept.

        The last attempt is set aside only when the record of the new attempt is written: until then, the last attempt's
        record is valid. Ended runs that exceed the limits are removed first.

        Raises:
            OSError: The directories cannot be created.
        """
        self.make(run_id)
        self.restore()
        self._prune(run_id)
        self._forget_oldest(run_id)
        if self._on_disk(run_id) is None:
            # The record of the last attempt is not on the disk: the disk was full when the host was restarted, or lost
            # the record.
            self._set_aside(run_id, _attempt(self.read(run_id)))
            os.mkdir(self._own_log(run_id), 0o700)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.files(run_id), 0o700)
            os.chown(self.files(run_id), uid, gid)

    def _set_aside(self, run_id: str, attempt: int) -> None:
        """Move the last attempt's log into the directory ``attempts/N``, and link the attempt's record into it.

        Args:
            run_id: The run.
            attempt: The number N of the attempt; 0 if there is no record.
        """
        log, record = self._own_log(run_id), self._records(run_id)[1]
        if not os.path.lexists(log) and not os.path.lexists(record):
            return
        folder = self._aside(run_id, attempt)
        if os.path.lexists(log) and os.path.lexists(folder):
            # Remove an existing ``attempts/N``: its attempt has lost its record, or an earlier call was interrupted.
            _remove_tree(folder, whole=False)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.path.lexists(record):
            _remove(os.path.join(folder, "record.json"))
            os.link(record, os.path.join(folder, "record.json"))
        if os.path.lexists(log):
            os.rename(log, self.log_aside(run_id, attempt))
        for name in BESIDE_LOG:
            with contextlib.suppress(FileNotFoundError):
                os.rename(os.path.join(self.directory(run_id), name), os.path.join(folder, name))

    def _forget_oldest(self, run_id: str) -> None:
        """Remove the oldest attempts that were set aside, to make room for one more."""
        parent = os.path.join(self.directory(run_id), "attempts")
        names = os.listdir(parent) if os.path.isdir(parent) else []
        kept = sorted((name for name in names if name.isdigit()), key=int)
        for name in kept[: max(0, len(kept) + 1 - KEPT_ATTEMPTS)]:
            _remove_tree(os.path.join(parent, name))

    def _own_log(self, run_id: str) -> str:
        """Return the directory of the log that belongs to the record on the disk."""
        return os.path.join(self.directory(run_id), "log")

    def _aside(self, run_id: str, attempt: int) -> str:
        """Return the directory of an attempt that was set aside."""
        return os.path.join(self.directory(run_id), "attempts", str(attempt))

    def _prune(self, current: str) -> None:
        """Remove ended runs that exceed the limits. If the user's files of a run exist, remove only its logs.

        Also remove runs without a record, which no command can show.
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
            # Remove the record last, and only if nothing else is left: a later call tries again.
            for name in filter(_BESIDE_RECORD.fullmatch, os.listdir(self.directory(run_id))):
                _remove(os.path.join(self.directory(run_id), name))
            if set(os.listdir(self.directory(run_id))) <= {"record.json"}:
                for path in (*self._records(run_id), self._changes(run_id)):
                    _remove(path)
                os.rmdir(self.directory(run_id))

    def _kept_logs(self, run_id: str) -> list[str]:
        """Return the directories of the logs of a run's attempts."""
        return [os.path.join(self.directory(run_id), name) for name in ("log", "attempts")]

    def _without_record(self) -> list[str]:
        """Return the names of run directories without a record; a damaged record counts as a record."""
        return [
            name
            for name in os.listdir(self.runs_dir)
            if is_run_id(name)
            and os.path.isdir(self.directory(name))
            and not any(map(os.path.lexists, self._records(name)))
        ]

    def _records(self, run_id: str) -> tuple[str, str]:
        """Return the two paths of a run's record: in memory, for use while the disk is full, and on the disk."""
        return os.path.join(self.run_dir, "records", run_id + ".json"), os.path.join(
            self.directory(run_id), "record.json"
        )

    def changing(self, run_id: str, *, anyway: bool = False, limit: float = private.LOCK_LIMIT) -> ContextManager[None]:
        """Lock a run's record, for a `with` block that sets it aside or changes it after the run's end.

        Each run has its own lock: a user can stop a process that holds the lock of the user's own run, and this must
        not block requests on other runs.

        Args:
            run_id: The run.
            anyway: Continue without the lock if another process keeps it.
            limit: Seconds to wait for the lock; at most `private.LOCK_LIMIT`.

        Raises:
            Refused: Another process keeps the lock.
        """
        private.directory(self.run_dir, "changes")
        return private.locked(self._changes(run_id), anyway=anyway, limit=limit)

    def _changes(self, run_id: str) -> str:
        """Return the path of the lock file for changes of a run's record."""
        return os.path.join(self.run_dir, "changes", run_id)

    def write(self, record: dict[str, Any]) -> None:
        """Write a run's record to the disk atomically, and remove its copy in memory.

        Raises:
            OSError: The record cannot be written.
        """
        self.to_disk(record)
        self.forget_in_memory(record["run_id"])

    def to_disk(self, record: dict[str, Any]) -> None:
        """Write a run's record to the disk, and keep a copy in memory, which takes precedence.

        If the record on the disk is that of an earlier attempt, set the earlier attempt aside with its log.

        Raises:
            OSError: The record cannot be written.
        """
        run_id = record["run_id"]
        path = self._records(run_id)[1]
        earlier = self._on_disk(run_id)
        if earlier is None or not _is_later(record, earlier):
            private.write(path, record)
            return
        # Set the log aside as late as possible: until the record is replaced, followers of the last attempt read its
        # log.
        private.write(path, record, lambda: self._set_aside(run_id, _attempt(earlier)))
        os.mkdir(self._own_log(run_id), 0o700)

    def forget_in_memory(self, run_id: str) -> None:
        """Remove the copy of a run's record in memory, so that the record on the disk is used."""
        _remove(self._records(run_id)[0])

    def save(self, record: dict[str, Any]) -> str:
        """Write a run's record to the disk, or to memory if the disk fails; return the error of the disk."""
        try:
            self.write(record)
        except OSError as exc:
            self.remember(record)
            return exc.strerror or str(exc)
        return ""

    def remember(self, record: dict[str, Any]) -> None:
        """Write a run's record to memory. Until a record is written to the disk again, the record in memory is used."""
        in_memory, _ = self._records(record["run_id"])
        with contextlib.suppress(OSError):
            private.directory(self.run_dir, "records")
            private.write(in_memory, record)

    def restore(self) -> None:
        """Write the records in memory to the disk; drop records of runs that have no directory."""
        for run_id in self._in_memory():
            with contextlib.suppress(OSError, private.Damaged):
                record = self.read(run_id)
                if record is not None and os.path.isdir(self.directory(run_id)):
                    self.write(record)
                else:
                    _remove(self._records(run_id)[0])

    def _in_memory(self) -> list[str]:
        """Return the ids of the runs that have a record in memory."""
        try:
            names = os.listdir(os.path.join(self.run_dir, "records"))
        except FileNotFoundError:
            return []
        return [name[: -len(".json")] for name in names if name.endswith(".json")]

    def read(self, run_id: str) -> dict[str, Any] | None:
        """Return a run's record; None if this host has no record of the run.

        Raises:
            Damaged: The record is unreadable.
        """
        found = (self._checked(run_id, path) for path in self._records(run_id))
        return next((record for record in found if record is not None), None)

    def _checked(self, run_id: str, path: str) -> dict[str, Any] | None:
        """Return the record of a run in a file; None if there is no file."""
        try:
            return private.read(path, lambda record: _is_record(record, run_id))
        except private.Damaged as damage:
            if (self.holder() or {}).get("run_id") == run_id:
                damage.fix = (
                    "the run is active: `sudo systemctl stop tpu-run.service` on this worker ends the run and "
                    "writes its record again"
                )
            elif path == self._records(run_id)[1]:
                fix = (
                    "`sudo mv {} /var/tmp/` on this worker keeps the run's log and files elsewhere, and frees the "
                    "run's name"
                )
                damage.fix = fix.format(self.directory(run_id))
            raise

    def _on_disk(self, run_id: str) -> dict[str, Any] | None:
        """Return a run's record on the disk; None if it is missing, or damaged and so will be replaced."""
        with contextlib.suppress(private.Damaged):
            return private.read(self._records(run_id)[1])
        return None

    def observe(self, run_id: str) -> dict[str, Any] | None:
        """Return a run's record, with the state ``lost`` if the supervisor died without writing a final record."""
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
        """Return whether nothing of an ended run is left: its control group, which disappears last, is gone.

        All runs use the same control group, so an existing group can belong to another active run.
        """
        if not record.get("cgroup") or not os.path.isdir(record["cgroup"]):
            return True
        holder = self.holder()
        return holder is not None and holder["supervisor"] != record["supervisor"]

    def settle(self, record: dict[str, Any], limit: float = SETTLE_LIMIT) -> None:
        """Wait up to ``limit`` seconds until an ended run's systemd unit is gone and the next run can start."""
        deadline = time.monotonic() + limit
        while not self.settled(record) and time.monotonic() < deadline:
            time.sleep(_POLL)

    @staticmethod
    def boot() -> tuple[str, int]:
        """Return values that identify this boot of this host."""
        return proc.boot_id(), proc.start_time(1)

    def of_this_boot(self, record: dict[str, Any]) -> bool:
        """Return whether a run began during this boot."""
        return (record["boot_id"], record["init_start"]) == self.boot()

    def recent(self, count: int | None = None) -> list[dict[str, Any]]:
        """Return the newest ``count`` records, or all records, newest first. Damaged records are left out."""
        return self.survey()[0][:count]

    def survey(self) -> tuple[list[dict[str, Any]], list[private.Damaged]]:
        """Return the records of all runs, newest first, and the errors of damaged records."""
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

    # --- the run lock of this host -------------------------------------------------

    def lock(self, holder: dict[str, Any]) -> TextIO | None:
        """Take this host's run lock, and write the holder into its file; return None if another run has the lock.

        The lock is held until the returned file is closed, at the latest until the process ends.
        """
        private.directory(self.run_dir)
        file = private.opened(self._lock_path())  # the lock is held as long as this file is open
        if not private.take(file):
            file.close()
            return None
        file.truncate(0)
        json.dump(holder, file, sort_keys=True)
        file.flush()
        return file

    def holder(self) -> dict[str, Any] | None:
        """Return the run that holds this host's run lock (see `rank_record.holder_of`); None if no run holds the lock.

        The lock itself is not tested, since that could disturb a supervisor that is taking it.
        """
        try:
            data = private.read(self._lock_path())
            supervisor = (data or {})["supervisor"]
            alive = proc.start_time(supervisor["pid"]) == supervisor["start"]
        except (private.Damaged, KeyError, TypeError):
            return None  # no run held the lock yet, or a supervisor is just writing the file
        return data if alive else None

    def _lock_path(self) -> str:
        return os.path.join(self.run_dir, "lock")

    # --- secrets: files of the user that exist while the run is active ------------------------------------------

    def put_secrets(self, secrets: Dict[str, str], person: Person) -> Dict[str, str]:
        """Write each secret to a file that only the user can read; return the variables for the command.

        Files of an earlier run are removed first. The directory belongs to root, so that no user can interfere.

        Returns:
            For each secret NAME, its value, and as NAME_FILE the path of its file.
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

    def put_reason(self, reason: Dict[str, Any], gid: int) -> None:
        """Write why a run is being ended to a file that the run's command can read; it is removed with the secrets."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.reason_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump(reason, file, sort_keys=True)
                os.fchown(descriptor, -1, gid)
                os.fchmod(descriptor, 0o640)

    def drop_secrets(self) -> None:
        """Remove the files with secrets, of any run, and the reason for its end."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.secrets_dir):
                os.unlink(os.path.join(self.secrets_dir, name))


def _is_record(record: dict[str, Any], run_id: str) -> bool:
    return record.get("run_id") == run_id and isinstance(record.get("state"), str)


def _attempt(record: dict[str, Any] | None) -> int:
    """Return the attempt's number in a record; 0 if there is no record or no number."""
    return int((record or {}).get("attempt", 0))


def same_start(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Return whether two records are of the same start. Comparing attempts is not enough: one can be started twice."""
    if one is None or other is None:
        return False
    return (_attempt(one), one.get("supervisor")) == (_attempt(other), other.get("supervisor"))


def _is_later(record: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Return whether a record is of a later attempt than another record, or of a later start of the same attempt."""
    return not same_start(record, earlier) and _attempt(record) >= _attempt(earlier)


def _remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _remove_tree(path: str, *, whole: bool = True) -> None:
    """Remove a directory with its content; without ``whole``, ignore files that cannot be removed."""
    import shutil  # imported late, since requests do not need it

    shutil.rmtree(path, ignore_errors=not whole)


def _size(folder: str) -> int:
    """Return the total size of all files below a directory, in bytes."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(parent, name)).st_size
    return found
