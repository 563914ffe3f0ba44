"""The supervisor: root, the main process of the run's unit; starts the command, waits, ends the tree, writes why."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Dict

from . import environment, proc, spec, unit
from .child import Child, NotReady
from .ending import chips_after, end_tree
from .logs import Logger
from .person import by_uid
from .store import FINAL, Store
from .wire import PROTOCOL, Refused

#: The signals that the supervisor waits for instead of being interrupted by them.
_AWAITED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_TICK = 2.0
#: How long to wait for the last bytes of the log once no process of the run is left, in seconds.
_DRAIN = 5.0


def new_record(data: Dict[str, Any], uid: int, name: str) -> Dict[str, Any]:
    """Return the record of a run that is being started. Values of the environment never stand in a record."""
    boot, init_start = Store.boot()
    kept = ("run_id", "attempt", "rank", "world_size", "node", "slice", "worker", "argv", "cwd", "venv")
    record = {key: data[key] for key in kept}
    record.update(
        protocol=PROTOCOL,
        person={"uid": uid, "name": name},
        env_names=sorted(data["env"]),
        spec_digest=spec.digest(data),
        code_digest=data["code_digest"],
        started_from=data["started_from"],
        grace={"failure": data["grace_failure"], "stop": data["grace_stop"]},
        boot_id=boot,
        init_start=init_start,
        supervisor={"pid": os.getpid(), "start": proc.start_time(os.getpid())},
        pid=0,
        cgroup="",
        since=time.time(),
        ended=None,
        state="starting",
        reason="",
        exit=None,
        intent=None,
    )
    return record


def verdict(status: int | None, intent: Dict[str, Any] | None) -> Dict[str, Any]:
    """Given the wait status of the command and why it was ended, return state, exit and reason.

    A command that was asked to end never counts as succeeded: many programs end with 0 on SIGTERM.
    """
    ending: Dict[str, Any] | None = None
    if status is not None:
        ending = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}
    if intent is not None:
        return {"state": "stopped", "exit": ending, "reason": intent.get("reason", "")}
    if ending is None:
        return {"state": "failed", "exit": None, "reason": "the command's end was not seen"}
    if ending == {"code": 0}:
        return {"state": "succeeded", "exit": ending, "reason": ""}
    if "signal" in ending:
        name = signal.Signals(ending["signal"]).name if ending["signal"] in set(signal.Signals) else "signal"
        return {"state": "failed", "exit": ending, "reason": "killed by {}".format(name)}
    return {"state": "failed", "exit": ending, "reason": "exit code {}".format(ending["code"])}


def held_by(holders: list[Dict[str, Any]]) -> str:
    """Given who holds the chips, return one line for people."""
    shown = ["pid {pid} of {user} ({command})".format(**holder) for holder in holders[:3]]
    more = " and {} more".format(len(holders) - 3) if len(holders) > 3 else ""
    return "the chips are held by {}{}".format(", ".join(shown), more)


class Supervisor:
    """One rank of one run, from the spec to the final record."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.record: Dict[str, Any] = {}
        self.child: Child | None = None
        self.status: int | None = None
        self.intent: Dict[str, Any] | None = None

    def run(self) -> int:
        """Do all of it and return the exit code of the unit's main process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        data, uid = spec.take(self.store.run_dir, self.run_id)
        person = by_uid(uid)
        self.record = new_record(data, person.uid, person.name)
        holder = {
            "run_id": self.run_id,
            "person": person.name,
            "uid": person.uid,
            "since": self.record["since"],
            "supervisor": self.record["supervisor"],
        }
        lock = self.store.lock(holder)
        if lock is None:
            # The unit's name is the first lock; this one catches a supervisor that somebody started by hand.
            return 75
        self.store.prepare(self.run_id, person.uid, person.gid)
        self.store.write(self.record)
        try:
            logger = self._prepare(data)
        except (NotReady, Refused, OSError) as exc:
            self._finish(state="refused", reason=str(exc), exit=None)
            return 1
        self._save(state="running")
        logger.start()
        unit.notify("READY=1\nSTATUS=run {} of {}".format(self.run_id, person.name))
        assert self.child is not None  # noqa: S101 - for the type checker
        error = self.child.go()
        self._wait()
        self._end(data, logger, error)
        lock.close()
        return 0

    def _prepare(self, data: Dict[str, Any]) -> Logger:
        """Fork the command and hold it: everything that can be wrong shows here, before anything runs."""
        person = by_uid(self.record["person"]["uid"])
        config = environment.load_config()
        venv = data["venv"] or config["venv"]
        files = self.store.files(self.run_id)
        env = environment.build(data, person, venv, environment.from_files(config["environment_files"]), files)
        holders = proc.holders()
        if holders:
            raise NotReady(held_by(holders))
        self.record["cgroup"] = proc.own_cgroup()
        source, output = os.pipe()
        try:
            cwd = environment.working_directory(data, person)
            self.child = Child.fork(data["argv"], env, cwd, person, output)
        finally:
            os.close(output)
        self.record.update(pid=self.child.pid, venv=venv, cwd=cwd)
        return Logger(source, self.store.logs(self.run_id))

    def _wait(self) -> None:
        """Return once the command has ended or somebody wants it to end."""
        while self.status is None and self.intent is None:
            self.pause(_TICK)

    def pause(self, seconds: float) -> None:
        """Wait for a signal, at most this long; collect ended children, note intents, keep the watchdog quiet."""
        got = signal.sigtimedwait(_AWAITED, max(0.0, seconds))
        unit.notify("WATCHDOG=1")
        if got is not None and got.si_signo != signal.SIGCHLD and self.intent is None:
            told = self.store.take_intent(self.run_id)
            self.intent = told or {"kind": "shutdown", "by": "systemd", "at": time.time(), "reason": "host shuts down"}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.child is not None and pid == self.child.pid:
                self.status = status

    def _end(self, data: Dict[str, Any], logger: Logger, error: str) -> None:
        """End what is left of the tree, look at the chips, write the final record."""
        intent = self.intent if self.status is None else None
        self._save(state="ending", intent=intent)
        grace = data["grace_failure"]
        if intent is not None:
            grace = min(float(intent.get("grace", data["grace_stop"])), data["grace_stop"])
        stuck = end_tree(self.record["cgroup"], grace, self.pause)
        chips = chips_after()
        deadline = time.monotonic() + _DRAIN
        while logger.is_alive() and time.monotonic() < deadline:
            logger.join(0.1)
            self.pause(0)
        result = verdict(self.status, intent)
        if error:
            result.update(state="failed", reason=error)
        self._finish(chips=chips, stuck=stuck, log=logger.facts(), **result)

    def _save(self, **changes: Any) -> None:
        self.record.update(changes)
        self.store.write(self.record)

    def _finish(self, **changes: Any) -> None:
        self._save(ended=time.time(), **changes)
        self.store.take_intent(self.run_id)


def after(store: Store, run_id: str) -> int:
    """Repeat the last checks once the unit's processes are gone, and close the record of a dead supervisor.

    systemd runs this (ExecStopPost) and tells in the environment how the supervisor ended.
    """
    spec.discard(store.run_dir, run_id)
    intent = store.take_intent(run_id)
    record = store.read(run_id)
    if record is None or record["state"] in FINAL:
        chips_after()
        return 0
    result = os.environ.get("SERVICE_RESULT", "unknown")
    how = "{} {}".format(os.environ.get("EXIT_CODE", ""), os.environ.get("EXIT_STATUS", "")).strip()
    reason = "the supervisor ended ({}; {})".format(result, how or "no more is known")
    state = "stopped" if intent or record.get("intent") else "failed"
    record.update(state=state, reason=reason, ended=time.time(), chips=chips_after(), stuck=[])
    record["intent"] = record.get("intent") or intent
    store.write(record)
    return 0
