"""The supervisor of a rank: the main process, as root, of the run's unit. It starts, watches and ends the command."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Dict, TextIO

from tpu_ops.protocol import spec
from tpu_ops.protocol.record import grace
from tpu_ops.protocol.wire import Refused, encode

from . import environment, fitness, last_look, proc, space, spec_files, unit
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
from .rank_record import (
    cause_of,
    exit_of,
    first_in,
    holder_of,
    intent_of,
    new_record,
    reason_of,
    requested_by,
    shutdown,
    verdict,
)
from .store import Store
from .tracebacks import STILL
from .watch import Watch
from .watching import started

#: Signal by which the link's thread tells the main thread that there is an order.
_WAKE = signal.SIGUSR1
#: Signals that are blocked, and that the supervisor receives by waiting for them.
_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, _WAKE)
_TICK = 2.0
#: Seconds to wait for the end of the log after the last process of the run has ended. If a process outside of the run
#: has the pipe open, or the disk stalls, output that is not written by then is lost.
_DRAIN = 5.0
#: If the kernel kills a process for lack of memory, a failure of the command within this many seconds counts as caused
#: by the kill. A command that loses a process, such as a data loader, takes a while to fail.
_OOM_SPAN = 10.0
#: Seconds to wait for the metadata server's answer whether a shutdown of the host is a preemption.
_NOTICE_LIMIT = 0.5
#: Maximum number of faults that a message contains.
_SHOWN = 3
#: Exit code of the supervisor if another supervisor holds this host.
_HELD = 75


class Supervisor:
    """One rank of one run, from the spec to the final record."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.record: Dict[str, Any] = {}
        self.child: Child | None = None
        #: Descriptor of the lock that keeps syncs from changing the code; closed when no process of the run is left.
        self._code: int | None = None
        self.status: int | None = None
        self.intent: Dict[str, Any] | None = None
        self.order: Dict[str, Any] | None = None
        self.link: Link
        self._intent_told = False
        self._link_closed = False
        #: The last error of writing the record to the disk, and when that was last tried (monotonic seconds).
        self._disk_fault = ""
        self._tried = 0.0
        self._keeper, self._last = Keeper(store), False
        self._watch: Watch | None = None
        #: The primary group of the run's user; the account may be gone at the run's end.
        self._gid = 0
        #: How many processes the kernel has killed for lack of memory, and when that last happened (monotonic seconds).
        self._oom_kills, self._oom_at = proc.oom_kills(), float("-inf")

    def run(self) -> int:
        """Run the rank to its end; return the exit code of the unit's main process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        data, uid, asked_by, marker = spec_files.read(self.store.run_dir, self.run_id)
        person = by_uid(uid)
        self.record = new_record(data, person, asked_by, marker)
        lock = self.store.lock(holder_of(self.record))
        if lock is None:
            # systemd allows only one unit of this name. The lock detects a supervisor that was started by hand.
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
            # Write the problem into the record, for a controller that only waits until this worker is reserved.
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
        self._watch = started(self.store, self.record, logger)
        self._live(data, logger, error)
        lock.close()
        return 0

    # --- before the command runs ----------------------------------------------------------------------------

    def _keep(self) -> None:
        """Create the files for the record and the log on the disk: a run without a record must not begin.

        Raises:
            NotReady: The disk is full, or a user has stopped the run.
        """
        person = self.record["person"]
        try:
            # Read the stop request before locking too: if the lock cannot be taken, it has to be in this record all the
            # same.
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
        """Copy the stop request of the last attempt into the record; return its user, empty if there is no request."""
        who = str((self.store.read(self.run_id) or {}).get("stop_requested_by") or "")
        self.record["stop_requested_by"] = who
        return who

    def _prepare(self, data: Dict[str, Any], config: Dict[str, Any]) -> tuple[Logger, Dict[bytes, bytes]]:
        """Check the host, and fork and hold the command, so that problems are found before any rank begins."""
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
        env[encode(spec.REASON_FILE)] = encode(self.store.reason_file)
        self.record["cgroup"], self._gid = proc.own_cgroup(), person.gid
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
        """Remove old lockfiles of libtpu: libtpu would fail if a lockfile belongs to another user.

        Raises:
            NotReady: A lockfile cannot be removed.
        """
        for path, fault in chips_after(unit.starting)["lockfile_faults"].items():
            raise NotReady("{} would make libtpu fail: {}".format(path, fault))

    def _linked(self, data: Dict[str, Any], config: Dict[str, Any], env: Dict[bytes, bytes]) -> Link:
        """Return the link to the other ranks. On rank 0, the link's ports are open when this returns."""
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
        """Wait until all ranks are ready or the start is given up; return whether the run begins."""
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
        """End a rank whose run does not begin."""
        order = self.order or {}
        if self.child is not None:
            self.child.drop()
        self._close()
        self._finish(state="refused", reason=order.get("reason", ""), blamed=order.get("ranks", []), intent=self.intent)

    # --- while it runs --------------------------------------------------------------------------------------

    def _live(self, data: Dict[str, Any], logger: Logger, error: str) -> None:
        """Wait until the command ends or is to be ended; end the remaining processes, and write the final record."""
        self._heed()
        while self.status is None and self.intent is None and not self._over:
            self.pause(_TICK)
            self._count_kills()
            self._note_traceback(logger)
            self._pass_on()
            # Report a stop request that arrived on this host before any process is ended.
            self._heed()
        self._pass_on()
        if self._watch:
            self._watch.stop()
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
        # Report processes that the command left behind only if it ended by itself. Otherwise they are ended on purpose.
        left = left_behind(self.record["cgroup"], self.pause) if ended_itself else []
        self.store.put_reason(reason_of(intent), self._gid)
        self._save(state="ending", intent=intent, left_behind=left)
        look = last_look.of_run(self.run_id)
        stuck = end_tree(self.record["cgroup"], self._grace(data, intent), self.pause, look)
        # Collect the command's exit status if the command ended after the last check of child processes.
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
        """Remember the time if the kernel has killed another process of the run for lack of memory."""
        count = proc.oom_kills()
        if count > self._oom_kills:
            self._oom_kills, self._oom_at = count, time.monotonic()

    def _note_traceback(self, logger: Logger) -> None:
        """Report once that this rank has printed a traceback and hangs: it may wait at its exit for other ranks."""
        found = logger.tracebacks.facts() if logger.tracebacks.stands_still() else None
        if found and self.record["traceback"] is None:
            text = (
                "rank {rank} ({worker}) printed a traceback at {at}, nothing in the {still:.0f} s after it, and has "
                "not ended: {error}; if it waits at its exit for the other ranks, they wait for it: "
                "`tpu_ops logs {run_id} --rank {rank}` shows the traceback, `tpu_ops stop {run_id}` ends all ranks"
            ).format(
                at=time.strftime("%H:%M:%S UTC", time.gmtime(found["at"])),
                still=STILL,
                error=found["error"],
                **self.record,
            )
            self._save(notes=[*self.record["notes"], text], traceback=found)

    def _pass_on(self) -> None:
        """Pass on what the watch has found: samples to the hub, notes to the record."""
        for kind, value in self._watch.take() if self._watch else ():
            if kind == "say":
                self.link.say(**value)
            else:
                self._save(notes=[*self.record["notes"], value])

    def _report(self, error: str, oom: bool) -> None:
        """Report to the other ranks how the command has ended by itself."""
        assert self.status is not None  # noqa: S101 - the caller knows
        ending = exit_of(self.status)
        self.link.say(say="ended", ending=ending, oom=oom, cause=error or cause_of(ending, oom), at=time.monotonic())

    @staticmethod
    def _grace(data: Dict[str, Any], intent: Dict[str, Any] | None) -> float:
        """Return the seconds between SIGTERM and SIGKILL for this rank."""
        return grace({"failure": data["grace_failure"], "stop": data["grace_stop"]}, intent)

    def _await_end(self, finished: bool) -> Dict[str, Any]:
        """Wait for the order that ends the whole run; return it. A finished rank waits in state ``exited``."""
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
        """Report that no process of the run is left on this host, and wait for the link's end."""
        # Unlock the code before the final record is written: once a run has ended, a sync may replace the run's code.
        if self._code is not None:
            os.close(self._code)
            self._code = None
        self.link.say(say="done", at=time.monotonic())
        while not self._link_closed:
            if self._listen() is None and not self._link_closed:
                self.pause(_TICK)

    # --- the other ranks --------------------------------------------------------------------------------------

    def _listen(self) -> Dict[str, Any] | None:
        """Report an intent, and process orders up to the first go, abort or end; return this order, else None.

        After the order to end the whole run, further decisions are ignored, for example that of a failing link.
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
            elif order["do"] == "stall":
                if self._watch:
                    self._watch.order(order)
            elif not self._over:
                self.order = order
                return order
            order = self.link.take()
        return None

    def _heed(self) -> None:
        """Report an intent and process all waiting orders, up to an order that ends the run."""
        while self._listen() is not None and not self._over:
            pass

    def pause(self, seconds: float) -> None:
        """Wait up to this many seconds for a signal; collect child processes, note intents, notify the watchdog."""
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
        """Note the intent to end this rank. An earlier intent is kept; a user's stop request is always recorded."""
        before, told = self.record["stop_requested_by"], self._note_stop_request()
        if self.intent is not None and self.record["stop_requested_by"] != before:
            # The earlier intent is in the record already, but the user's stop request is not.
            self._save()
        if self.intent is None:
            self.intent = told or self._told_by_systemd()

    def _told_by_systemd(self) -> Dict[str, Any]:
        """Return the intent if systemd sent the signal: the host shuts down, or an administrator stopped the unit."""
        if self._watch:
            self._watch.look()
        if not unit.stopped_by_hand():
            notice = self._watch.notice(_NOTICE_LIMIT) if self._watch else None
            return shutdown(notice)
        reason = "stopped by systemctl on {}".format(self.record["worker"])
        intent = {"kind": "stop", "by": "an administrator", "at": time.time(), "reason": reason, "requested": True}
        self.record["stop_requested_by"] = self.record["stop_requested_by"] or requested_by(intent)
        return intent

    def _note_stop_request(self) -> Dict[str, Any] | None:
        """Return and remove the stored intent for this rank, or None; record the user who requested a stop."""
        told = self.store.take_intent(self.run_id)
        self.record["stop_requested_by"] = self.record["stop_requested_by"] or requested_by(told)
        return told

    # --- the record -----------------------------------------------------------------------------------------

    def _save(self, **changes: Any) -> None:
        """Write the record. If the disk fails, note the error once and try again later, without blocking."""
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
    """Return as text why a rank cannot start, and the fix."""
    if isinstance(exc, Refused):
        return "{}; {}".format(exc.message, exc.fix) if exc.fix else exc.message
    if isinstance(exc, OSError):
        if exc.errno in space.NOT_TAKEN:
            # Apart from its record, a start only writes the files with secrets.
            paths = [os.fsdecode(exc.filename)] if exc.filename else ["/run"]
            return "{} cannot be written: {}; {}".format(paths[0], space.why(exc, paths), space.fix(exc, paths))
        where = " ({})".format(os.fsdecode(exc.filename)) if exc.filename else ""
        text = "the supervisor cannot prepare the command: {}{}; `sudo journalctl -u {}` on this worker shows more"
        return text.format(exc.strerror or exc, where, unit.UNIT)
    return str(exc)
