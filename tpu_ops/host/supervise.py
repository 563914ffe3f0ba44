"""The supervisor: root, the main process of the run's unit; starts the command with the others, waits, ends it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Dict, TextIO

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import grace
from tpu_ops.protocol.wire import Refused

from . import environment, fitness, proc, space, spec_files, unit
from .child import Child, output_pipe
from .code import Copy
from .command import NotReady
from .ending import chips_after, end_tree, left_behind
from .hub import Hub
from .keeper import Keeper
from .link import Alone, Link, team
from .logs import Logger
from .peer import Peer
from .person import by_uid
from .rank_record import cause_of, exit_of, first_in, holder_of, intent_of, new_record, requested_by, verdict
from .store import Store
from .tracebacks import STILL

#: Sent by the link's thread to the main one: there is an order.
_WAKE = signal.SIGUSR1
#: The signals that the supervisor waits for instead of being interrupted by them.
_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, _WAKE)
_TICK = 2.0
#: How long to wait for the last bytes of the log once no process of the run is left, in seconds: somebody whom the run
#: does not own may keep it open, or the disk stall. What is not written by the end of the last record is lost.
_DRAIN = 5.0
#: How long after a kill for want of memory a failure counts as its consequence, in seconds: a command that loses a
#: process of its own, one that loads data for example, takes a while to say so.
_OOM_SPAN = 10.0
#: Reasons why no run can start here that are told at once.
_SHOWN = 3
#: Exit code where another supervisor has this host.
_HELD = 75


class Supervisor:
    """One rank of one run, from the spec to the final record."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.record: Dict[str, Any] = {}
        self.child: Child | None = None
        #: Descriptor of the lock that keeps syncs from the code; closed once no process of the run is left.
        self._code: int | None = None
        self.status: int | None = None
        self.intent: Dict[str, Any] | None = None
        self.order: Dict[str, Any] | None = None
        self.link: Link
        self._intent_told = False
        self._link_closed = False
        #: What is wrong with the disk that the record belongs on, and when it was tried last (monotonic seconds).
        self._disk_fault = ""
        self._tried = 0.0
        self._keeper, self._last = Keeper(store), False
        #: How many of its processes the kernel has killed for want of memory, and when the last (monotonic seconds).
        self._oom_kills, self._oom_at = proc.oom_kills(), float("-inf")

    def run(self) -> int:
        """Do all of it and return the exit code of the unit's main process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        data, uid, asked_by, marker = spec_files.read(self.store.run_dir, self.run_id)
        person = by_uid(uid)
        self.record = new_record(data, person, asked_by, marker)
        lock = self.store.lock(holder_of(self.record))
        if lock is None:
            # The unit's name is the first lock; this one catches a supervisor that somebody started by hand.
            spec_files.discard(self.store.run_dir, self.run_id, marker)
            return _HELD
        return self._run(data, lock)

    def _run(self, data: Dict[str, Any], lock: TextIO) -> int:
        problem = ""
        logger: Logger | None = None
        try:
            self._keep()
            config = environment.load_config()
            logger, env = self._prepare(data, config)
            self.link = self._linked(data, config, env)
        except (NotReady, Refused, OSError) as exc:
            problem = _told(exc)
            if data["rank"] == 0:
                self._finish(state="refused", reason=problem, blamed=[0])
                return 1
            # A starter that waits for no more than this worker's lock is to hear of it too.
            self._save(reason=problem)
            self.link = Peer(team(data, self.record["spec_digest"]), self._waker(), problem)
        self.link.start()
        said = "READY=1\nSTATUS=run {} of {}".format(self.run_id, self.record["person"]["name"])
        unit.notify(said, limit=unit.START_LIMIT)
        if not self._may_go():
            self._refused()
            return 1
        assert self.child is not None  # noqa: S101 - for the type checker
        assert logger is not None  # noqa: S101 - a rank with a problem never goes
        logger.start()
        error = self.child.go()
        self._save(state="running", began=time.time())
        self._live(data, logger, error)
        lock.close()
        return 0

    # --- before the command runs ----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Make the place of the record and the log, on the disk: what nobody could look up later is not begun.

        Raises:
            NotReady: The disk does not take them, or somebody wanted no other attempt before this one came.
        """
        person = self.record["person"]
        try:
            # Where others do not let go of the records, this one is to be kept all the same, with what it replaces.
            self._take_stop_request()
            self.store.make(self.run_id)
            with self.store.changing(self.run_id):
                who = self._take_stop_request()
                self.store.prepare(self.run_id, person["uid"], by_uid(person["uid"]).gid)
                self.store.write(self.record)
        except OSError as exc:
            where = [self.store.runs_dir]
            text = "no record or log can be kept in {}: {}; {}"
            raise NotReady(text.format(where[0], space.why(exc, where), space.fix(exc, where))) from exc
        finally:
            spec_files.discard(self.store.run_dir, self.run_id, self.record["marker"])
        if who:
            raise NotReady("run {} was stopped by {}".format(self.run_id, who))

    def _take_stop_request(self) -> str:
        """Have in the record who wanted no other attempt while the last one was on; return them, empty for nobody."""
        who = str((self.store.read(self.run_id) or {}).get("stop_requested_by") or "")
        self.record["stop_requested_by"] = who
        return who

    def _prepare(self, data: Dict[str, Any], config: Dict[str, Any]) -> tuple[Logger, Dict[bytes, bytes]]:
        """Fork the command and hold it: everything that can be wrong shows here, before anything runs."""
        person = by_uid(self.record["person"]["uid"])
        facts = fitness.look(config, person, data["venv"], self.store.turns_dir, unit.starting)
        faults = fitness.faults(facts, data["chips"], force=data["force"], asker=by_uid(self.record["asked_by"]))
        if faults:
            self.record["failed_checks"] = sorted({fault["check"] for fault in faults})
            raise NotReady("; ".join(fitness.told(fault, data["worker"]) for fault in faults[:_SHOWN]))
        if data["chips"]:
            self._clear_lockfiles()
        venv = facts["venv"]["path"]
        from_host = environment.from_files(config["environment_files"])
        from_host.update(self.store.put_secrets(data["secrets"], person))
        env = environment.build(data, person, venv, from_host, self.store.files(self.run_id))
        self.record["cgroup"] = proc.own_cgroup()
        source, output = output_pipe(person)
        try:
            cwd, digest = environment.working_directory(data, person), spec.copied(data)
            copy = Copy(cwd, digest, holder_of(self.record)) if digest else None
            self.child = Child.fork(data["argv"], env, cwd, person, output, commit=spec.commit(data), copy=copy)
            if copy:
                self._code = copy.hold(person)
        finally:
            os.close(output)
        self.record.update(pid=self.child.pid, venv=venv, cwd=cwd)
        return Logger(source, self.store.logs(self.run_id)), env

    @staticmethod
    def _clear_lockfiles() -> None:
        """Remove what earlier processes have left of libtpu's lockfiles: with one of another user there it gives up.

        Raises:
            NotReady: One has to stay.
        """
        for path, fault in chips_after(unit.starting)["lockfile_faults"].items():
            raise NotReady("{} would make libtpu fail: {}".format(path, fault))

    def _linked(self, data: Dict[str, Any], config: Dict[str, Any], env: Dict[bytes, bytes]) -> Link:
        """Return what ties this rank to the others; rank 0 has its ports then."""
        others = team(data, self.record["spec_digest"])
        if data["net"] is None:
            return Alone(others, self._waker())
        if data["rank"] > 0:
            return Peer(others, self._waker())
        port = environment.coordinator_port(env)
        limit = max(data["grace_failure"], data["grace_stop"])
        hub = Hub(others, self._waker(), ports=config["ports"], coordinator=port, ending_limit=limit)
        self._save(port=hub.port)
        return hub

    @staticmethod
    def _waker() -> Any:
        main = threading.main_thread().ident
        assert main is not None  # noqa: S101 - the main thread runs
        return lambda: signal.pthread_kill(main, _WAKE)

    def _may_go(self) -> bool:
        """Wait at the barrier; return whether all ranks go."""
        told = False
        while True:
            order = self._listen()
            if order is not None:
                return bool(order["do"] == "go")
            if self.status is not None and not told:
                cause = cause_of(exit_of(self.status), proc.oom_kills() > self._oom_kills)
                reason = "the process that waits to execute its command has ended: {}".format(cause)
                self.link.say(say="refused", reason=reason)
                told = True
            self.pause(_TICK)

    def _refused(self) -> None:
        """This run does not happen."""
        order = self.order or {}
        if self.child is not None:
            self.child.drop()
        self._close()
        self._finish(state="refused", reason=order.get("reason", ""), blamed=order.get("ranks", []), intent=self.intent)

    # --- while it runs --------------------------------------------------------------------------------------

    def _live(self, data: Dict[str, Any], logger: Logger, error: str) -> None:
        """Wait for the command's end or the order to end it, end what is left, write the final record."""
        self._heed()
        while self.status is None and self.intent is None and not self._over:
            self.pause(_TICK)
            self._count_kills()
            self._note_traceback(logger)
            # What this host was just asked for is told before anything here is ended.
            self._heed()
        oom = False
        ended_itself = self.status is not None
        if self.status is not None:
            self._count_kills()
            self.record["exited"] = time.time()
            oom = self.status != 0 and time.monotonic() - self._oom_at <= _OOM_SPAN
            self._report(error, oom)
        elif self.intent is None:
            self.intent, self._intent_told = intent_of(self.order or {}), True
        intent = None if ended_itself else self.intent
        # A stop or a failure elsewhere tells that all is ended; after its own end nobody expects that anything is.
        left = left_behind(self.record["cgroup"], self.pause) if ended_itself else []
        self._save(state="ending", intent=intent, left_behind=left)
        stuck = end_tree(self.record["cgroup"], self._grace(data, intent), self.pause)
        # The command may have been the last to go, after the last look at ended children.
        self.pause(0)
        ended = time.time()
        chips = chips_after(unit.beat)
        deadline = time.monotonic() + _DRAIN
        while logger.is_alive() and time.monotonic() < deadline:
            logger.join(0.1)
            self.pause(0)
        self._save(ended=ended, chips=chips, stuck=stuck, log=logger.facts(), traceback=logger.tracebacks.facts())
        ending = self._await_end(ended_itself)
        if ended_itself and ending["kind"] == "stop":
            intent = intent_of(ending)
        result = verdict(self.status, intent, oom)
        if error:
            result.update(state="failed", reason=error)
        self._close()
        self._finish(first=first_in(ending, intent), intent=intent, log=logger.facts(last=True), **result)

    def _count_kills(self) -> None:
        """Note when the kernel has killed a process of the run for want of memory."""
        count = proc.oom_kills()
        if count > self._oom_kills:
            self._oom_kills, self._oom_at = count, time.monotonic()

    def _note_traceback(self, logger: Logger) -> None:
        """Say once that this rank has printed a traceback and stands still: it may wait at its exit for others."""
        found = logger.tracebacks.facts() if logger.tracebacks.stands_still() else None
        if found and self.record["traceback"] is None:
            text = (
                "rank {rank} ({worker}) printed a traceback at {at}, nothing in the {still:.0f} s after it, and has "
                "not ended: {error}; if it waits at its exit for the other ranks, they wait for it: "
                "`tpu_ops logs {run_id} --rank {rank}` shows it, `tpu_ops stop {run_id}` ends all"
            ).format(
                at=time.strftime("%H:%M:%S UTC", time.gmtime(found["at"])),
                still=STILL,
                error=found["error"],
                **self.record,
            )
            self._save(notes=[*self.record["notes"], text], traceback=found)

    def _report(self, error: str, oom: bool) -> None:
        """Tell the others how the command has ended by itself."""
        assert self.status is not None  # noqa: S101 - the caller knows
        ending = exit_of(self.status)
        self.link.say(say="ended", ending=ending, oom=oom, cause=error or cause_of(ending, oom), at=time.monotonic())

    @staticmethod
    def _grace(data: Dict[str, Any], intent: Dict[str, Any] | None) -> float:
        """Return how long processes have from SIGTERM to SIGKILL."""
        return grace({"failure": data["grace_failure"], "stop": data["grace_stop"]}, intent)

    def _await_end(self, finished: bool) -> Dict[str, Any]:
        """Return how the whole run ends once that is known; a rank that has finished is shown as such meanwhile."""
        order = self._listen()
        if finished and order is None and not self._over:
            self._save(state="exited", exit=exit_of(self.status or 0))
        while not self._over:
            if self._listen() is None:
                self.pause(_TICK)
        return self.order or {}

    @property
    def _over(self) -> bool:
        return self.order is not None and self.order["do"] == "end"

    def _close(self) -> None:
        """Tell that nothing is left here, and let the link end; rank 0's waits for all others."""
        # Before the final record: once a run has ended, a sync may replace its code.
        if self._code is not None:
            os.close(self._code)
            self._code = None
        self.link.say(say="done", at=time.monotonic())
        while not self._link_closed:
            if self._listen() is None and not self._link_closed:
                self.pause(_TICK)

    # --- the others -----------------------------------------------------------------------------------------

    def _listen(self) -> Dict[str, Any] | None:
        """Tell an intent and take orders, up to and with the first go, abort or end; return that one, else None.

        Once the whole run ends nothing else decides: what a link that fails says then is too late.
        """
        if (self._disk_fault or self._keeper.fault) and time.monotonic() - self._tried >= _TICK:
            self._save()
        if self.intent is not None and not self._intent_told:
            self.link.say(say="stop", intent=self.intent, at=time.monotonic())
            self._intent_told = True
        order = self.link.take()
        while order is not None:
            if order["do"] == "note":
                self._save(notes=[*self.record["notes"], order["text"]])
            elif order["do"] == "closed":
                self._link_closed = True
            elif not self._over:
                self.order = order
                return order
            order = self.link.take()
        return None

    def _heed(self) -> None:
        """Tell an intent and take all orders that are there, up to the run's end."""
        while self._listen() is not None and not self._over:
            pass

    def pause(self, seconds: float) -> None:
        """Wait for a signal, at most this long; collect ended children, note intents, keep the watchdog quiet."""
        got = signal.sigtimedwait(_AWAITED, max(0.0, seconds))
        unit.beat()
        if got is not None and got.si_signo in (signal.SIGTERM, signal.SIGINT):
            self._asked_to_end()
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.child is not None and pid == self.child.pid:
                self.status = status

    def _asked_to_end(self) -> None:
        """Note why this rank is to end. What ended it before stays, and whoever wants no other attempt is known."""
        before, told = self.record["stop_requested_by"], self._note_stop_request()
        if self.intent is not None and self.record["stop_requested_by"] != before:
            # What ends it has been written; this stands nowhere else any more.
            self._save()
        if self.intent is None:
            self.intent = told or self._told_by_systemd()

    def _told_by_systemd(self) -> Dict[str, Any]:
        """Return why systemd ends the unit: the host shuts down, or somebody who knows nothing of tpu_ops stops it."""
        if not unit.stopped_by_hand():
            return {"kind": "shutdown", "by": "systemd", "at": time.time(), "reason": "host shuts down"}
        reason = "stopped by systemctl on {}".format(self.record["worker"])
        intent = {"kind": "stop", "by": "an administrator", "at": time.time(), "reason": reason, "requested": True}
        self.record["stop_requested_by"] = self.record["stop_requested_by"] or requested_by(intent)
        return intent

    def _note_stop_request(self) -> Dict[str, Any] | None:
        """Take the intent that was written for this rank, if any; whoever wants no other attempt stays on record."""
        told = self.store.take_intent(self.run_id)
        self.record["stop_requested_by"] = self.record["stop_requested_by"] or requested_by(told)
        return told

    # --- the record -----------------------------------------------------------------------------------------

    def _save(self, **changes: Any) -> None:
        """Write the record. That the disk does not take it is noted once and tried again, and in the way of nothing."""
        self.record.update(changes)
        beat = unit.beat if self._last else None
        fault = self._keeper.save(dict(self.record), beat)
        if fault and not self._disk_fault:
            text = "rank {rank} ({worker}): the run's record cannot be written to the disk and is kept in memory: "
            room = space.left(self.store.runs_dir)
            note = text.format(**self.record) + fault + (" ({})".format(room) if room else "")
            self.record["notes"] = [*self.record["notes"], note]
            self._keeper.save(dict(self.record), beat)
        self._disk_fault, self._tried = fault, time.monotonic()

    def _finish(self, **changes: Any) -> None:
        self.store.drop_secrets()
        self._note_stop_request()
        self._last = True
        self._save(ended=self.record["ended"] or time.time(), **changes)


def _told(exc: Exception) -> str:
    """Return why a rank cannot start, and what to do."""
    if isinstance(exc, Refused):
        return "{}; {}".format(exc.message, exc.fix) if exc.fix else exc.message
    if isinstance(exc, OSError):
        if exc.errno in space.NOT_TAKEN:
            # What a start writes beyond its record are the files of its secrets.
            paths = [os.fsdecode(exc.filename)] if exc.filename else ["/run"]
            return "{} cannot be written: {}; {}".format(paths[0], space.why(exc, paths), space.fix(exc, paths))
        where = " ({})".format(os.fsdecode(exc.filename)) if exc.filename else ""
        text = "the supervisor cannot prepare the command: {}{}; `sudo journalctl -u {}` on this worker shows more"
        return text.format(exc.strerror or exc, where, unit.UNIT)
    return str(exc)
