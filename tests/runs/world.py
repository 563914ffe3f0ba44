"""A stand-in for the API and the workers of one node, and what follows a run in it through its attempts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod, probe, stand_in
from tpu_ops.cli import recovering
from tpu_ops.cloud.node import Worker
from tpu_ops.cloud.pending import Requests
from tpu_ops.cloud.remaking import Made, Plan, Seen
from tpu_ops.errors import OpsError
from tpu_ops.protocol.wire import DATA, END
from tpu_ops.recovery import attempt
from tpu_ops.recovery.driver import Driver
from tpu_ops.runs import follow, projects, recovery, spec
from tpu_ops.ssh.masters import Unreachable
from tpu_ops.ssh.replies import Reply, Result
from tpu_ops.ssh.stream import Frame

NODE = pod(2)[0].node.full_name


def ended(state: str, exit_: Mapping[str, int] | None = None, intent: str = "", first: bool = False) -> dict[str, Any]:
    """Return the record of a rank that has ended."""
    named = {"rank": 0, "worker": "pod-w0", "cause": "exit code 3"} if first else None
    told = {"kind": intent} if intent else None
    return {
        "state": state,
        "exit": exit_,
        "reason": "",
        "first": named,
        "intent": told,
        "since": 1.0,
        "ended": 2.0,
        "person": {"name": "ada"},
        "code_digest": "d1",
    }


DONE = ended("succeeded", {"code": 0})
FAILED = ended("failed", {"code": 3}, first=True)
STOPPED = ended("stopped", {"signal": 15}, "stop")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: Ends an attempt in place of a record.
PREEMPTED, SILENT = "preempted", "silent"


class World:
    """Stands for the API and the workers of one node of two.

    Args:
        endings: What becomes of each attempt: a record that both ranks end with, or what happens to the node.
        attempt: The one that is on.
    """

    masters: Any = SimpleNamespace(drop=lambda host: asyncio.sleep(0))

    def __init__(self, *endings: Any, attempt: int = 1) -> None:
        self.endings = dict(enumerate(endings, attempt))
        self.attempt = attempt
        self.node_id, self.state = "1", "READY"
        #: The label that the node has now.
        self.called = "pod"
        self.done: list[str] = []
        self.specs: list[dict[str, Any]] = []
        #: What the next workers that are asked for an action answer instead.
        self.refusals: list[tuple[str, Reply]] = []
        self.refusal: OpsError | None = None
        self.commit = COMMIT
        #: Seconds of each pause before another try.
        self.pauses: list[float] = []
        #: What the API has of the nodes that cannot be made again, in words.
        self.lacking: list[str] = []
        #: The environment of the workers, as in their probes.
        self.venv: dict[str, Any] = probe()["venv"]
        #: The versions that the last playbook had to keep.
        self.kept_versions: Mapping[str, Mapping[str, str]] = {}

    # --- the workers

    @property
    def workers(self) -> list[Worker]:
        return pod(2, self.called, self.node_id)

    def knows(self, host: str) -> bool:
        return any(worker.host == host for worker in self.workers)

    async def call(self, requests: Any, action: str, *, done: Any = None, **_: Any) -> dict[str, Reply]:
        found = {}
        for host in requests:
            value: dict[str, Any] = {
                "probe": probe(boot_id=host, venv=self.venv),
                "record": {"state": "starting", "port": 8500},
            }
            found[host] = Reply(host, value)
            refusal = self.refusals.pop(0)[1] if self.refusals and self.refusals[0][0] == action else None
            if action == "start":
                sent = requests[host]["spec"]
                self.specs.append(sent)
                # Who does not answer in time may have started it all the same.
                if refusal is None or refusal.kind == "timeout":
                    self.attempt = sent["attempt"]
            if action == "status":
                found[host] = self.status(host)
            if refusal:
                found[host] = refusal._replace(host=host)
            if done:
                done(found[host])
        if action not in ("probe", "status"):
            self.done.append(f"{action} {self.attempt}" if len(requests) == 1 else f"{action} {self.attempt} others")
        return found

    def status(self, host: str) -> Reply:
        ending = self.endings[self.attempt]
        if self.state != "READY" or ending == SILENT or not self.knows(host):
            return Reply(host, {}, "unreachable", "no route to host")
        record = ending if isinstance(ending, Mapping) else ended("lost")
        return Reply(host, {"record": {**record, "attempt": self.attempt}})

    @contextlib.asynccontextmanager
    async def stream(self, host: str, action: str, values: Mapping[str, Any]) -> AsyncIterator[Any]:
        ending = self.endings[self.attempt]
        if ending == PREEMPTED:
            self.state = "PREEMPTED"
        if self.state != "READY" or ending == SILENT or not self.knows(host):
            raise Unreachable("no route to host")
        text = f"attempt {self.attempt}\n".encode()
        offset = values["offset"]

        async def frames() -> AsyncIterator[Frame]:
            yield Frame(DATA, offset, text)
            record = {**ending, "attempt": self.attempt}
            yield Frame(END, offset + len(text), json.dumps({"record": record, "tail": ""}).encode())

        async def answer() -> Reply:
            return Reply(host, {"record": {"attempt": self.attempt}})

        yield SimpleNamespace(answer=answer, frames=frames)

    # --- what the driver uses (`recovery.services.Services`)

    def remember(self, names: Iterable[str], lacks: Callable[[str], object]) -> Plan:
        for lacking in self.lacking:
            lacks(lacking)
        return Plan(tuple(Made(name, self.node_id, {}) for name in names))

    def look(self, plan: Plan) -> dict[str, Seen]:
        return {made.name: Seen(self.state, self.node_id) for made in plan.nodes}

    def bring_back(self, plan: Plan, request: str, requests: Requests) -> dict[str, Seen]:
        self.done.append(f"bring back {request}")
        if self.refusal:
            refusal, self.refusal = self.refusal, None
            raise refusal
        if self.state != "READY":
            requests.send(NODE, "create", lambda: "operation")
            self.state, self.node_id = "READY", str(int(self.node_id) + 1)
            requests.seen(NODE, self.state, self.node_id)
        return self.look(plan)

    def fleet(self) -> Any:
        return SimpleNamespace(workers=self.workers, warnings=())

    def hosts(self) -> set[str]:
        return {worker.host for worker in self.workers}

    def workers_of(self, _: Sequence[str]) -> tuple[Any, list[Worker]]:
        return self.fleet(), self.workers

    def fanout(self, _: object) -> Any:
        return self

    def configure(self, _: object, workers: Sequence[Worker], kept: Mapping[str, Mapping[str, str]]) -> None:
        self.kept_versions = kept
        self.done.append(f"configure {len(workers)}")

    def check_out(self, _: object, __: Sequence[Worker], project: str) -> None:
        self.done.append(f"workspace {project}")

    async def check_commit(self, fanout: Any, hosts: Sequence[str], run: spec.RunSpec) -> None:
        await projects.look(fanout, hosts, run)

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def run(self, hosts: Sequence[str], *_: Any, **__: Any) -> dict[str, Result]:
        return {host: Result(host, 0, self.commit.encode()) for host in hosts}


def keep(driver: Driver, **changes: Any) -> None:
    """Change what is kept of a run, and write it."""
    driver.state = replace(driver.state, kept=replace(driver.kept, **changes))
    recovery.write(driver._state_dir, driver.kept)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, World, recovering.Recovering]]:
    """Follow a run whose first attempt is on, in a world, to its end."""
    monkeypatch.setattr(follow, "RETRY_EVERY", 0.01)
    monkeypatch.setattr(follow, "RETRY_LIMIT", 0.2)
    monkeypatch.setattr(follow, "ALONE_LIMIT", 0.2)
    monkeypatch.setattr(attempt, "LOOK", 0.05)

    def followed(
        world: World, *words: str, first: Any = None, **changes: Any
    ) -> tuple[int, World, recovering.Recovering]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--rank", default="0")
        parser.add_argument("--exit-code", default="1")
        asked = spec.RunSpec("r1", ("true",), attempt=world.attempt, cwd="/srv/vision", code_digest=COMMIT)
        kept = recovery.Recovery("r1", world.attempt, Plan((Made(NODE, "1", {}),)), recovery.options_of(asked, {}))
        settings: Any = stand_in(tmp_path)
        kept, args = replace(kept, **changes), parser.parse_args(words)
        job = recovering.Recovering(settings, kept, asked, args, begun=False, uses=world)
        if first:
            return job.to_the_end(first(job.driver)), world, job
        if job.kept.pending:
            return job.to_the_end(None), world, job
        return job.to_the_end(job.driver.started(world.fanout(None), world.workers)), world, job

    return followed
