"""A stand-in for the API and the workers of one node, and what follows a run in it through its attempts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.test_parts import pod, probe, stand_in
from tpu_ops.cli import attempt, recovering
from tpu_ops.errors import OpsError
from tpu_ops.fleet.model import Worker
from tpu_ops.fleet.remaking import Made, Plan, Seen
from tpu_ops.fleet.requests import Requests
from tpu_ops.remote.playbook import Outcome
from tpu_ops.remote.replies import Reply, Result
from tpu_ops.remote.ssh import Unreachable
from tpu_ops.remote.wire import DATA, END, Frame
from tpu_ops.runs import follow, recovery, spec

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

    # --- the workers

    @property
    def workers(self) -> list[Worker]:
        return pod(2, self.called, self.node_id)

    def knows(self, host: str) -> bool:
        return any(worker.host == host for worker in self.workers)

    async def call(self, requests: Any, action: str, *, done: Any = None, **_: Any) -> dict[str, Reply]:
        found = {}
        for host in requests:
            value: dict[str, Any] = {"probe": probe(boot_id=host), "record": {"state": "starting", "port": 8500}}
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

    # --- the API

    def look(self, _: object, plan: Plan) -> dict[str, Seen]:
        return {made.name: Seen(self.state, self.node_id) for made in plan.nodes}

    def bring_back(
        self,
        _: object,
        plan: Plan,
        request: str,
        told: Callable[[str], None],
        asked: Requests,
        *,
        used: Callable[[Any], str] | None = None,
    ) -> dict[str, Seen]:
        self.done.append(f"bring back {request}")
        if self.refusal:
            refusal, self.refusal = self.refusal, None
            raise refusal
        if self.state != "READY":
            asked.send(NODE, "create", lambda: "operation")
            self.state, self.node_id = "READY", str(int(self.node_id) + 1)
            asked.seen(NODE, self.state, self.node_id)
        return self.look(None, plan)

    def known(self, *_: object) -> tuple[Any, list[Worker]]:
        return SimpleNamespace(warnings=()), self.workers

    def converge(
        self, _: object, __: object, workers: Sequence[Worker], name: str = "site", variables: Any = None, **___: Any
    ) -> Outcome:
        self.done.append(f"configure {len(workers)}" if name == "site" else f"{name} {variables['workspace_only']}")
        told = {"paths": {"vision": "/srv/vision"}, "commits": {"vision": COMMIT}}
        return Outcome(data={"workspace": {worker.host: told for worker in workers}})

    async def run(self, hosts: Sequence[str], *_: Any, **__: Any) -> dict[str, Result]:
        return {host: Result(host, 0, self.commit.encode()) for host in hosts}


def keep(job: recovering.Recovering, **changes: Any) -> None:
    """Change what is kept of a run, and write it."""
    job.state = replace(job.state, kept=replace(job.kept, **changes))
    recovery.write(job._settings.state_dir, job.kept)


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
        for name, value in {
            "origin.api": lambda _: contextlib.nullcontext(),
            "remaking.look": world.look,
            "remaking.bring_back": world.bring_back,
            "newcomers.known": world.known,
            "configure.converge": world.converge,
            "view.current": lambda *_: SimpleNamespace(workers=world.workers, warnings=()),
            "view.known": lambda _: SimpleNamespace(workers=world.workers),
            "contact.fanout": lambda _: world,
        }.items():
            monkeypatch.setattr(f"tpu_ops.cli.bringing.{name}", value)
        parser = argparse.ArgumentParser()
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--rank", default="0")
        parser.add_argument("--exit-code", default="1")
        asked = spec.RunSpec("r1", ("true",), attempt=world.attempt, cwd="/srv/vision", code_digest=COMMIT)
        kept = recovery.Recovery("r1", world.attempt, Plan((Made(NODE, "1", {}),)), recovery.options_of(asked, {}))
        settings: Any = stand_in(tmp_path)
        kept, args = replace(kept, **changes), parser.parse_args(words)
        job = recovering.Recovering(settings, kept, asked, args, begun=False, sleep=world.pauses.append)
        world_fanout: Any = world
        if first:
            return job.to_the_end(first(job)), world, job
        if job.kept.pending:
            return job.to_the_end(None), world, job
        return job.to_the_end(job.started(world_fanout, world.workers)), world, job

    return followed
