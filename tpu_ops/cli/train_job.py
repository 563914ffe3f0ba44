"""The run that `tpu_ops train` starts: the workers are checked, the code is copied, the run is followed to its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpu_ops import texts
from tpu_ops.ansible import convergence
from tpu_ops.cli import (
    faults,
    output,
    progress,
    recovering,
    run_end,
    runs_output,
)
from tpu_ops.cli import sync as cli_sync
from tpu_ops.cli.configure import Progress
from tpu_ops.cloud import remaking
from tpu_ops.cloud.node import Worker
from tpu_ops.errors import ExitCode, HostError, OpsError, UsageError
from tpu_ops.fleet import contact, holdings, targets, view
from tpu_ops.runs import (
    control,
    endings,
    installs,
    launch,
    nodes,
    preflight,
    projects,
    ranks,
    records,
    recovery,
    spec,
    sync,
    turns,
)
from tpu_ops.runs.follow import Follower
from tpu_ops.runs.outcomes import Outcome, run_state
from tpu_ops.ssh.fanout import Fanout


def ranked(fleet: view.Fleet, target: str) -> list[Worker]:
    """Return the workers of a target by rank."""
    return control.by_rank(targets.select(fleet.workers, target, listed=fleet.listed), target)


@dataclass
class Job:
    """The run that one `tpu_ops train` starts, from the checks of the workers to its end.

    Args:
        fleet: The fleet.
        workers: The workers of the target, by rank.
        spec: What the run is.
        tree: The directory that is copied to the workers; None without one.
        shown: The ranks whose output is printed.
        args: The options of the command.
        listed: The packages of the directory that might be installed; None if it lists none.
    """

    fleet: view.Fleet
    workers: Sequence[Worker]
    spec: spec.RunSpec
    tree: sync.Tree | None
    shown: Sequence[int]
    args: argparse.Namespace
    listed: installs.Listing | None = None

    started_by: Fanout | None = None
    ended: run_end.End = None
    guard: recovering.Recovering | None = None
    project: projects.Project | None = None
    before: records.RunRecord | None = None
    asked: bool = False
    may_be_on: bool = False
    ready: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    overridden: Callable[[preflight.Fault], None] = field(default_factory=faults.overriding)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the workers, ordered by rank."""
        return tuple(worker.host for worker in self.workers)

    def recovered(self) -> recovering.Recovering:
        """Return the recovery of this run, which starts it again if its nodes are taken away; store nothing yet."""
        kept = recovery.Recovery(
            self.spec.run_id,
            0,
            remaking.Plan(()),
            recovery.options_of(self.spec, spec.parse_env(self.args.env)),
            env_files=tuple(str(path.absolute()) for path in self.args.env_file),
            secret_words=tuple(map(recovery.absolute, self.args.secret)),
            code=self.tree is not None,
            git=self.project.fixed if self.project else "",
            force=self.args.force,
            outside_grant=self.args.outside_grant,
            max_preemptions=self.args.max_preemptions,
            max_failures=self.args.max_failures or 0,
            pending=True,
            since=time.time(),
        )
        said = self.fleet.warnings
        self.guard = recovering.Recovering(self.fleet.settings, kept, self.spec, self.args, begun=False, said=said)
        return self.guard

    def look_ahead(self) -> None:
        """Check whether this user and shell could configure a node that is recreated later.

        Raises:
            OpsError: The run cannot be started, or Ansible lacks something, such as a vault password.
        """
        if not self.args.outside_grant:
            now = dt.datetime.now(dt.UTC)
            members = {worker.node.full_name: worker.node for worker in self.workers}
            holdings.must_be_covered(holdings.read(self.fleet.settings, now), members.values(), now)
        fanout = contact.fanout(self.fleet)

        async def without_sudo() -> list[str]:
            if not self.project:
                await self._check(fanout)
            return await projects.without_sudo(fanout, self.hosts)

        if lacking := asyncio.run(without_sudo()):
            output.warning(
                f"{texts.folded(lacking)}: you do not have the full passwordless sudo there that site.yml needs: "
                "recovery will end if a node has to be recreated"
            )
            return
        output.info("checking whether site.yml could configure a recreated node")
        try:
            convergence.rehearse(self.fleet, self.workers, Progress)
        except (HostError, UsageError) as exc:
            if not self.args.force:
                raise
            output.warning(f"{exc}; recovery will end if a node has to be recreated")

    def facts(self) -> dict[str, Any]:
        """Return the facts of the recovery for --json, besides the ranks; empty for a run without recovery."""
        return self.guard.facts() if self.guard else {}

    def bring(self) -> None:
        """Check out the project on the workers before the start, if no run is active there: runs share the clone."""
        fanout = contact.fanout(self.fleet)

        async def ready() -> None:
            await self._check(fanout)
            await projects.must_configure(fanout, self.hosts)

        asyncio.run(ready())
        projects.must_be_declared(self.fleet.settings, os.environ.get("ANSIBLE_INVENTORY", ""))
        begun, dry = time.monotonic(), self.args.dry_run
        self.project = projects.check_out(self.fleet, self.workers, self.args.git, Progress, dry=dry)
        self.spec = replace(self.spec, cwd=self.project.path, code_digest=self.project.commit)
        where = f"{self.project.path} on {texts.count(len(self.hosts), 'worker')}"
        output.info(
            f"{'would check out' if dry else 'checked out'} {self.project.name} in {where}: "
            f"commit {self.project.commit or 'not known yet'}, {time.monotonic() - begun:.1f} s"
        )

    async def run(self) -> int:
        """Start the run and follow it to its end; return the exit code."""
        fanout = contact.fanout(self.fleet)
        if self.args.dry_run and self.project:
            return self._would()
        if self.args.dry_run:
            await self._check(fanout)
            if self.tree:
                await sync.look(fanout, self.hosts, self.tree)
            return self._would()
        await self._check(fanout)
        async with contextlib.AsyncExitStack() as stack:
            tree, turn = self.tree, None
            if tree:
                # Hold the lock on the directory until all ranks are ready and have locked the directory themselves.
                turn = await stack.enter_async_context(turns.alone(fanout, self.hosts, tree.name))
            if self.guard:
                # Every attempt has to use the present code: sync a local copy of it.
                self.tree = await self.guard.driver.begin(self.workers, tree, self.environment)
            if tree and self.tree and turn:
                begun = time.monotonic()
                with progress.transfers("syncing") as moved:
                    await sync.push(fanout, self.hosts, self.tree, turn, moved)
                cli_sync.said(tree, self.hosts, time.monotonic() - begun)
                if self.listed:
                    await self._install(fanout, self.tree, self.listed)
            if self.project:
                await projects.look(fanout, self.hosts, self.spec)
            await self._start(fanout)
        if self.guard:
            return await self.guard.driver.started(fanout, self.workers)
        if self.args.detach:
            return self._detach()
        outcomes = await self._follow(fanout)
        self.started_by = None
        state = run_state(outcomes)
        self.ended = (state, outcomes)
        records.close(self.fleet.settings.state_dir, self.spec.run_id, state, outcomes=outcomes)
        of_rank = self.args.exit_code == "rank"
        return runs_output.finish(
            self.spec.run_id,
            outcomes,
            self.shown,
            as_json=self.args.json,
            of_rank=of_rank,
            states=lambda: nodes.states(self.fleet),
        )

    async def _check(self, fanout: Fanout) -> None:
        begun, self.before = time.monotonic(), records.read(self.fleet.settings.state_dir, self.spec.run_id)
        if self.args.name:
            recovery.require_none(self.fleet.settings.state_dir, self.spec.run_id, alone=self.guard is not None)
            await control.require_free_name(self.fleet, fanout, self.spec.run_id, self.hosts)
        forced = self.overridden if self.args.force else None

        async def check() -> dict[str, Mapping[str, Any]]:
            venv, user, run_id = self.spec.venv, self.spec.user, self.spec.run_id
            return await preflight.check(fanout, self.workers, venv, user, forced=forced, run_id=run_id)

        probes = await check()
        if self._made_anew():
            probes = await check()
        venv = next(iter(probes.values()))["venv"]
        self.environment = venv if venv["exists"] else {}
        packages = ", ".join(f"{name} {version}" for name, version in venv["packages"].items() if name != "numpy")
        environment = f"{venv['path']} (Python {venv['python']}{', ' if packages else ''}{packages}, {venv['digest']})"
        ready = environment if venv["path"] else "no environment configured"
        if ready != self.ready:
            taken = f"{time.monotonic() - begun:.1f} s"
            output.info(f"{texts.count(len(self.workers), 'worker')} ready in {taken}: {ready}")
        self.ready = ready

    async def _install(self, fanout: Fanout, tree: sync.Tree, listed: installs.Listing) -> None:
        """Install the packages of the synced project, and have the run use its environment."""
        base = self.environment.get("path", "")
        if not base and not self.args.install:
            return
        if not base:
            what = "packages of a project are installed over the fleet's environment, which the workers lack"
            raise UsageError(
                what, where="--install", fix="name an environment: --venv PATH; or leave it out: --no-install"
            )
        begun, seen = time.monotonic(), await installs.look(fanout, self.hosts, tree, listed, base)
        if not (self.args.install or seen.had):
            output.info(f"{listed.name} is only copied; --install installs what it lists on the workers")
            return
        made = seen.installed
        if not made:
            output.info(f"installing what {listed.name} lists on {texts.count(len(self.hosts), 'worker')}")
            made = await installs.install(fanout, self.workers, tree, listed, base=base, pins=seen.pins)
        output.info(installs.text(made, listed, self.hosts, time.monotonic() - begun))
        self.spec = replace(self.spec, venv=made.path)
        if self.guard:
            recovery.keep_packages(self.fleet.settings.state_dir, self.spec.run_id, made)

    def fleet_now(self) -> view.Fleet:
        """Return the fleet as this machine knows it."""
        return view.known(self.fleet.settings) or self.fleet

    def _made_anew(self) -> bool:
        """Read the last known view of the fleet again; return whether the target's workers have changed."""
        before = self.hosts
        # The warnings of this view were printed by the command that asked the API for it.
        self.fleet = self.fleet_now()
        self.workers = ranked(self.fleet, self.args.target)
        self.shown = ranks.parse(self.args.rank, len(self.workers))
        return self.hosts != before

    def _would(self) -> int:
        cwd = self.spec.cwd if self.project else f"~{self.spec.user}/{self.spec.cwd}"
        plan = {
            "run_id": self.spec.run_id,
            "workers": list(self.hosts),
            "command": list(self.spec.argv),
            "user": self.spec.user,
            "cwd": cwd,
            "env_names": sorted(self.spec.env),
            "secret_names": sorted(self.spec.secrets),
            "sync_files": len(self.tree.files) if self.tree else 0,
            "code_digest": self.spec.code_digest,
        }
        if self.args.json:
            output.as_json(plan)
        else:
            output.line(f"would start {self.spec.run_id}: {shlex.join(self.spec.argv)} in {cwd}")
            for what, names in (("variables", self.spec.env), ("secrets", self.spec.secrets)):
                if names:
                    output.line(f"{what}: {', '.join(sorted(names))}")
            output.line(f"on {', '.join(self.hosts)}; nothing was changed")
        return ExitCode.OK

    async def _start(self, fanout: Fanout) -> None:
        state_dir = self.fleet.settings.state_dir
        begun = time.monotonic()
        before = self.before
        records.begin(state_dir, records.started_on(self.spec.run_id, self.workers, self.spec.argv), before)
        try:
            if self.guard:
                self.guard.driver.starts()
            self.asked = True
            await launch.start(fanout, self.spec, self.workers)
        except (OpsError, launch.Interrupted, OSError) as exc:
            # An error without `may_be_on`, such as a changed host key, does not tell whether the run has started.
            self.may_be_on = self.asked and getattr(exc, "may_be_on", not isinstance(exc, UsageError))
            if self.may_be_on:
                # Keep this machine's record and the recovery state of the run: other commands find the run by them.
                if self.guard:
                    self.guard.driver.may_be_on()
                if isinstance(exc, OSError):
                    output.info(f"this machine failed while starting run {self.spec.run_id}: it may be running")
                    self._hints()
            elif before:
                records.write(state_dir, before)
            else:
                records.forget(state_dir, self.spec.run_id)
            raise
        self.started_by = fanout
        recovery.taken_up(state_dir, [worker.node for worker in self.workers])
        where, took = texts.count(len(self.hosts), "worker"), time.monotonic() - begun
        output.info(f"run {self.spec.run_id} started on {where} in {took:.1f} s: {shlex.join(self.spec.argv)}")

    async def _follow(self, fanout: Fanout) -> list[Outcome]:
        follower = Follower(
            fanout,
            self.spec.run_id,
            self.hosts,
            shown=self.shown,
            line=runs_output.line_aside if self.args.json else runs_output.line,
            part=runs_output.part_aside if self.args.json else runs_output.part,
            say=output.info,
            taken=nodes.taken(self.fleet, self.spec.run_id),
        )
        return await follower.run()

    def _detach(self) -> int:
        if self.args.json:
            output.as_json({"run_id": self.spec.run_id, "state": "running", "workers": list(self.hosts)})
        self._hints()
        return ExitCode.OK

    def _hints(self) -> None:
        runs_output.hints(self.spec.run_id)

    def running(self) -> tuple[Fanout, control.RunRef] | None:
        """Return the run and the connections to its workers; None before the start."""
        return (self.started_by, control.RunRef(self.spec.run_id, self.hosts)) if self.started_by else None

    def begun_run(self) -> control.RunRef | None:
        """Return the run; None before the start."""
        return control.RunRef(self.spec.run_id, self.hosts) if self.started_by or self.ended else None

    def stopped(self, outcomes: Sequence[Outcome]) -> None:
        """Write the outcomes of the stopped run to this machine's record."""
        state = run_state(outcomes)
        self.ended = (state, outcomes)
        records.close(self.fleet.settings.state_dir, self.spec.run_id, state, endings.STOPPED, outcomes)

    def left(self) -> None:
        """Print after Ctrl-C whether the run continues, and how to reach it."""
        if self.started_by:
            output.info(f"detached: run {self.spec.run_id} continues")
            self._hints()
        elif self.may_be_on:
            output.info(f"interrupted while starting run {self.spec.run_id}: it may be running")
            self._hints()
        else:
            output.info("interrupted before the run was started")
            if self.asked and len(self.hosts) > 1:
                output.info(f"  a worker already waiting for the others gives up within {self.spec.barrier:.0f} s")
