"""Connects to the workers of a fleet; if a worker does not answer, refreshes the fleet to find its current address."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from tpu_ops import texts
from tpu_ops.cloud.node import SERVING_STATES, TAKEN_STATES, Worker, label_of, without_workers
from tpu_ops.cloud.remedies import until_ready
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UnreachableError
from tpu_ops.files import UnwritableError
from tpu_ops.fleet import origin, selection, targets, view
from tpu_ops.fleet.publishing import sources
from tpu_ops.fleet.state import Files
from tpu_ops.fleet.view import Fleet
from tpu_ops.ssh import host_keys, identities, openssh
from tpu_ops.ssh.fanout import Fanout
from tpu_ops.ssh.jump import place_of
from tpu_ops.ssh.mux import Master
from tpu_ops.ssh.renewal import News, in_thread
from tpu_ops.ssh.replies import Reply, Result
from tpu_ops.ssh.ways import SSH_PORT

#: Seconds for a worker to accept a connection, and for a jump host, which all workers behind it need.
_CONNECTS, _JUMP_CONNECTS = 1.5, 5.0
#: Maximum number of workers or nodes that a message names.
_NAMES = 4

#: Maximum number of changes of the fleet that are logged.
_LINES = 12

_log = logging.getLogger(__name__)


def fanout(fleet: Fleet) -> Fanout:
    """Return the fan-out to the workers of a fleet. The fan-out asks the API about workers that no longer answer."""
    ways = selection.ways_of(fleet.settings, fleet.listed)
    proxied = {worker.host for worker in fleet.workers if ways.of(worker).proxy} if ways.proxies else set()
    search = _Search(fleet)
    return Fanout(
        fleet.ssh_config,
        search.news,
        proxied,
        search.master,
        taken=search.is_taken,
        connects=search.connects,
        jump=ways.lead,
    )


def run(fleet: Fleet, hosts: Sequence[str], argv: Sequence[str], limit: float) -> dict[str, Result]:
    """Run a command without input on many workers at once; ask the API about workers that do not answer.

    Args:
        fleet: The fleet of the workers.
        hosts: The workers.
        argv: The command and its arguments; no shell expands them.
        limit: Time limit in seconds for each worker, including the connection.

    Raises:
        OpsError: This process may not open enough files, or the API could not be asked about silent workers.
    """
    return asyncio.run(fanout(fleet).run(hosts, argv, limit=limit))


def find(settings: Settings, target: str) -> tuple[Fleet, list[Worker]]:
    """Return the fleet and the workers of a target; refresh the fleet before an unknown name is reported.

    Raises:
        UsageError: The target is unknown, or matches no worker.
        UnreachableError: The target is a node without workers.
        CloudError: There is no snapshot yet, and the API refused or did not answer.
    """
    begun = time.time()
    fleet = view.current(settings)
    try:
        return fleet, targets.select(fleet.workers, target, settings.states, fleet.listed)
    except targets.UnknownError as exc:
        found = None if fleet.asked_at >= begun else _asked(fleet, f"{exc.what} in the last known view", "new nodes")
        if found is not None:
            fleet = found
    for node in fleet.nodes:
        if fleet.labels[node.full_name] == target and not node.worker_count:
            raise UnreachableError(f"it {without_workers(node)}", where=f"node {target}", fix=until_ready(node))
    if target.startswith("@") and fleet.nodes and not fleet.workers:
        states = [
            f"{fleet.labels[node.full_name]} is {node.state}"
            f"{' without network endpoints' if node.state in SERVING_STATES else ''}"
            for node in fleet.nodes
        ]
        first = fleet.nodes[0]
        fix = f"{fleet.labels[first.full_name]}: {until_ready(first)}"
        raise UnreachableError(f"no node has workers: {texts.some(states)}", where=f"target {target}", fix=fix)
    return fleet, targets.select(fleet.workers, target, settings.states, fleet.listed)


def login_hint(settings: Settings, said: str = "") -> str:
    """Return the fix for workers that refuse the login user.

    Args:
        settings: The fleet's settings.
        said: ssh's message about one of the workers.
    """
    fleet = view.last(settings) if openssh.refused_by_proxy(said) else None
    if fleet and (jump := selection.ways_of(settings, fleet.listed).outside):
        return (
            f"{jump} (proxy_jump), through which the workers are reached, refuses you: your own ssh config sets the "
            f"account and key for this host; check that `ssh {jump}` asks for nothing (docs/ssh.md)"
        )
    if openssh.too_many(said) and not settings.only_key:
        return (
            f"set `private_key` in {settings.file} (or TPU_OPS_PRIVATE_KEY) to the key that the workers know: then "
            "ssh offers only this key, and no keys of your agent before it"
        )
    keys = [path for path in (settings.private_key, *settings.more_keys) if path]
    key = f"with {', '.join(map(str, keys)) or 'the keys that ssh finds'}"
    faults = [fault for fault in (identities.agent_fault(), *map(identities.fault, keys)) if fault]
    return (
        f"{'. '.join([*faults, 'Otherwise: '] if faults else [])}"
        f"you logged in as {settings.user} {key}. If that is wrong, set `user` and `private_key` in {settings.file} "
        "(or TPU_OPS_USER, TPU_OPS_PRIVATE_KEY). If your key is not on the workers, their administrator adds it to "
        "`users_people` (docs/members.md). With OS Login: `gcloud compute os-login ssh-keys add --key-file KEY.pub` "
        "and the login name of your OS Login profile as `user`, or enable-oslogin=FALSE in the node's metadata "
        "(docs/ssh.md)"
    )


def with_hint(settings: Settings, replies: Iterable[Reply]) -> tuple[Reply, ...]:
    """Return the workers' replies; a reply that says that ssh refused the user's login gets the fix of `login_hint`."""
    # Computed once per message of ssh, since `login_hint` reads the user's keys.
    hint = functools.cache(lambda said: login_hint(settings, said))

    def telling(said: str) -> str:
        """Return the message without the worker's own address."""
        return said if openssh.too_many(said) or openssh.refused_by_proxy(said) else ""

    return tuple(
        reply._replace(fix=hint(telling(reply.problem)))
        if reply.kind == "unreachable" and openssh.refused(reply.problem)
        else reply
        for reply in replies
    )


def chosen(settings: Settings, target: str | None) -> tuple[Fleet, list[Worker]]:
    """Return the fleet and the workers of a target; without a target, the workers of all READY nodes."""
    if target:
        fleet, workers = find(settings, target)
        return serving(fleet, workers), workers
    fleet = view.current(settings)
    return fleet, [worker for worker in fleet.workers if worker.node.state in SERVING_STATES]


def serving(fleet: Fleet, workers: Iterable[Worker]) -> Fleet:
    """Return the fleet; refresh it first if one of these workers could not be reached according to the last listing.

    Raises:
        HostKeyAlarm: A node publishes a key that differs from the known one.
    """
    ways = selection.ways_of(fleet.settings, fleet.listed)
    away = [worker for worker in workers if worker.node.state not in SERVING_STATES or ways.of(worker).problem]
    if not away:
        return fleet
    hosts = {worker.host for worker in away}
    found = _asked(fleet, _last_seen(away), _addresses({worker.label for worker in away}), hosts)
    return found or fleet


def out_of_reach(fleet: Fleet, hosts: Iterable[str]) -> dict[str, str]:
    """Return worker -> why it cannot be reached according to the last listing; reachable workers are left out."""
    workers = {worker.host: worker for worker in fleet.workers}
    sizes = {worker.label: worker.node.worker_count for worker in fleet.workers}
    ways = selection.ways_of(fleet.settings, fleet.listed)
    found = {}
    for host in hosts:
        worker, label = workers.get(host), label_of(host)
        if worker is None:
            size = sizes.get(label, 0)
            found[host] = f"its node has {texts.count(size, 'worker')} now" if size else "its node no longer exists"
        elif worker.node.state not in SERVING_STATES:
            found[host] = f"its node is {worker.node.state} now"
        elif problem := ways.of(worker).problem:
            found[host] = f"it {problem}"
    return found


def away(fleet: Fleet, hosts: Iterable[str]) -> dict[str, Reply]:
    """Return a reply for each worker that cannot be reached according to the last listing."""
    found = out_of_reach(fleet, hosts)
    return {host: Reply(host, {}, "unreachable", why, way_back(fleet, [host])) for host, why in found.items()}


def way_back(fleet: Fleet, away: Collection[str]) -> str:
    """Return the fix for workers that are out of reach: that of the first node that is not READY, if there is one."""
    nodes = (worker.node for worker in fleet.workers if worker.host in away)
    node = next((node for node in nodes if node.state not in SERVING_STATES), None)
    listed = "`tpu_ops list` shows which nodes are READY and which addresses they have"
    return until_ready(node) if node else listed


def without_host_keys(fleet: Fleet) -> dict[str, str]:
    """Return worker -> fix, for each worker of a READY node if its host key or its jump host's is unknown."""
    settings, keys = fleet.settings, host_keys.keys_of(fleet.settings)
    found = {
        worker.host: host_keys.to_trust(worker)
        for worker in selection.reached(settings, fleet.listed)
        if worker.node.state in SERVING_STATES and worker.host_key_alias not in keys
    }
    ways = selection.ways_of(settings, fleet.listed)
    if ways.jump in found:
        found |= {worker.host: found[ways.jump] for worker in fleet.workers if ways.of(worker).proxy}
    return found


class _Search:
    """Asks the API about workers of a fleet that do not answer, and finds the control socket of each worker."""

    def __init__(self, fleet: Fleet) -> None:
        self._lock = threading.Lock()
        self._outside: tuple[str, int] | None = None
        self._take(fleet)

    def _take(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._ways = selection.ways_of(fleet.settings, fleet.listed)
        self._workers = {worker.host: worker for worker in fleet.workers}

    def _jump_place(self) -> tuple[str, int]:
        """Return address and port of the jump; the address is empty if there is no jump or its address is unknown."""
        if not self._ways.outside:
            return self._ways.jump_place
        with self._lock:
            if self._outside is None:
                config = Files(self._fleet.settings.state_dir).jump_config
                self._outside = place_of(config, self._ways.outside_options, self._ways.outside)
            return self._outside

    def master(self, host: str) -> Master | None:
        """Return where the ssh master of a worker listens; None if the worker, or the way to it, is unknown."""
        worker = self._workers.get(host)
        return self._ways.master(worker) if worker else None

    def is_taken(self, host: str) -> bool:
        """Return whether a worker's node was preempted or stopped in the last listing."""
        worker = self._workers.get(host)
        return worker is not None and worker.node.state in TAKEN_STATES

    async def connects(self, host: str) -> bool:
        """Return whether a worker, or its jump host, accepts connections; True if no known address can be tested."""
        worker = self._workers.get(host)
        way = self._ways.of(worker) if worker else None
        if way is None:
            return True
        # Only the jump can be tested for a worker behind a proxy. A jump behind another jump cannot be tested.
        place = await in_thread(self._jump_place) if way.proxy else (way.address, SSH_PORT)
        if not place[0]:
            return True
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECTS):
                _, writer = await asyncio.open_connection(*place)
                writer.close()
                return True
        return False

    def news(self, hosts: Sequence[str]) -> News:
        """Refresh the fleet; return which workers are reached in a new way, and the state of the given workers."""
        before, former = _ways(self._fleet), self._workers
        if all(map(self.is_taken, hosts)):
            said, whose = _last_seen([former[host] for host in hosts]), {former[host].label for host in hosts}
        else:
            said = f"{texts.some(hosts, _NAMES, 'others')} {'do' if len(hosts) > 1 else 'does'} not answer"
            whose = set(hosts)
        fleet = _asked(self._fleet, said, _addresses(whose), {*hosts, self._ways.jump})
        if fleet is None:
            return News()
        self._take(fleet)
        after = _ways(fleet)
        changed = frozenset(
            worker.host
            for worker in fleet.workers
            if worker.node.state in SERVING_STATES
            and after[worker.host][0]
            and after[worker.host] != before.get(worker.host)
        )
        called = {worker.host_key_alias: worker.host for worker in fleet.workers}
        names = {host: called.get(former[host].host_key_alias, host) for host in hosts if host in former}
        renamed = {host: f"its name is {name} now" for host, name in names.items() if name != host}
        # Include all other preempted or stopped workers: connecting to these would fail too.
        notes = _notes(fleet, {*hosts, *filter(self.is_taken, self._workers)}) | renamed
        fixes = {host: way_back(fleet, [host]) for host in out_of_reach(fleet, notes)}
        if shut := self._behind_a_silent_jump(hosts, changed):
            jump = self._ways.jump or self._ways.outside
            place = " port ".join(map(str, self._jump_place()))
            at = f"the worker is reached through {jump} (proxy_jump), which takes no connections at {place}"
            fix = f"check that {jump} runs and that you can connect to this port, or set another proxy_jump"
            notes, fixes = notes | dict.fromkeys(shut, at), fixes | dict.fromkeys(shut, fix)
        return News(changed, notes, fixes)

    def _behind_a_silent_jump(self, hosts: Sequence[str], changed: Collection[str]) -> list[str]:
        """Return all workers behind the jump host if the jump host accepts no connections; else an empty list."""
        place = self._jump_place()
        behind = [host for host, worker in self._workers.items() if place[0] and self._ways.of(worker).proxy]
        if not {*behind} & {*hosts} or {*behind} & {*changed}:
            return []
        with contextlib.suppress(OSError):
            socket.create_connection(place, timeout=_JUMP_CONNECTS).close()
            return []
        return behind


def _addresses(names: Collection[str]) -> str:
    return "its address" if len(names) == 1 else "their addresses"


def _last_seen(workers: Iterable[Worker]) -> str:
    """Return the states of the workers' nodes in the last listing, as a reason to ask the API again."""
    nodes = {worker.label: worker.node.state for worker in workers}
    return texts.some([f"{label} was {state} when last seen" for label, state in nodes.items()], _NAMES, "others")


def _asked(fleet: Fleet, reason: str, what: str, hosts: Collection[str] = ()) -> Fleet | None:
    """Refresh the fleet; log the reason, the purpose and the changes of these hosts. None: the refresh failed."""
    source = origin.source_of(fleet.settings)
    asking = f"reading {sources.shown(source)} again" if source else "asking the API"
    _log.info("%s: %s for %s", reason, asking, what)
    try:
        found, changes = view.refresh(fleet.settings)
    except (CloudError, UnwritableError) as exc:
        # The command continues with the known addresses, for example if the disk is full.
        _log.warning("the refresh failed: %s", exc)
        return None
    # Warnings that the fleet already had were logged before.
    for text in (text for text in found.warnings if text not in fleet.warnings):
        _log.warning("%s", text)
    news = changes.about(hosts).news()
    for text in news[:_LINES]:
        _log.info("  %s", text)
    if len(news) > _LINES:
        _log.info("  and %d more changes", len(news) - _LINES)
    return found


def _ways(fleet: Fleet) -> dict[str, tuple[str, ...]]:
    """Return host -> values that determine how it is reached. The first is the address, empty if there is none."""
    keys = host_keys.keys_of(fleet.settings)
    ways = selection.ways_of(fleet.settings, fleet.listed)
    found = {}
    for worker in fleet.workers:
        way, alias = ways.of(worker), worker.host_key_alias
        through = (ways.jump_place[0], *_known(keys, ways.jump_alias)) if way.proxy and ways.jump else ()
        found[worker.host] = (way.address, way.proxy, *through, *_known(keys, alias))
    return found


def _known(keys: Mapping[str, Mapping[str, str]], alias: str) -> tuple[str, ...]:
    """Return a worker's alias in known_hosts and its known host keys."""
    return (alias, *sorted(keys.get(alias, {}).values()))


def _notes(fleet: Fleet, hosts: Iterable[str]) -> dict[str, str]:
    """Return worker -> a clause on its state that is appended to ssh's message; the worker does not answer."""
    age = dict.fromkeys(hosts, f"its address is as {fleet.age}") if fleet.source else {}
    return age | without_host_keys(fleet) | out_of_reach(fleet, hosts)
