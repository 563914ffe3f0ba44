"""The nodes and queued resources of a fleet, and how much of the fleet's grant they use."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tpu_ops import texts
from tpu_ops.cloud import bodies
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.listing import Place, QueuedListing, list_queued, list_set_up
from tpu_ops.cloud.node import SERVING_STATES, Node
from tpu_ops.cloud.queued_resources import QueuedResource
from tpu_ops.cloud.remaking import Plan
from tpu_ops.cloud.setups import Setup
from tpu_ops.cloud.wish import Wish
from tpu_ops.cloud.zones import locations
from tpu_ops.config import Settings
from tpu_ops.errors import UsageError
from tpu_ops.fleet import grant
from tpu_ops.fleet.grant import Grant, Use
from tpu_ops.options import did_you_mean, shown

_log = logging.getLogger(__name__)

#: File in the fleet's state directory that exists once the user was told that the fleet has no grant.yml.
_TOLD = "no-grant"
#: Seconds for which one listing serves all nodes that wait for capacity.
FRESH = 10.0


class Holdings(NamedTuple):
    """The nodes and queued resources of a fleet's projects, in all zones and without the fleet's filters.

    Attributes:
        nodes: The nodes in every state.
        queued: The queued resources in every state.
        warnings: One sentence for each place that could not be listed.
        setups: Resource name of each node -> how it was set up.
        unlisted: Places whose nodes or queued resources are unknown; the project and zone ``-`` mean all.
    """

    nodes: tuple[Node, ...]
    queued: tuple[QueuedResource, ...]
    warnings: tuple[str, ...] = ()
    setups: Mapping[str, Setup] = MappingProxyType({})
    unlisted: tuple[Place, ...] = ()

    @property
    def uses(self) -> list[Use]:
        """What uses quota: every node, and every node of a queued resource that does not exist yet or any more."""
        return uses_of(self.nodes, self.queued)


def look(tpu: Tpu, settings: Settings, *projects: str) -> Holdings:
    """Ask the API for all nodes and queued resources of the fleet's projects.

    Args:
        tpu: The client.
        settings: The settings of the fleet.
        projects: Further projects.

    Raises:
        ApiError: The API refused or did not answer.
    """
    named = tuple(dict.fromkeys((*settings.projects, *projects)))
    listing, setups = list_set_up(tpu, named)
    try:
        found = list_queued(tpu, named)
    except ApiError as exc:
        if exc.status != "PERMISSION_DENIED":
            raise
        found = QueuedListing((), (("-", "-"),), (f"queued resources cannot be listed: {exc}",))
    warnings = tuple(dict.fromkeys((*listing.warnings, *found.warnings)))
    unlisted = tuple(dict.fromkeys((*listing.unanswered, *found.unanswered)))
    return Holdings(listing.nodes, found.queued, warnings, setups, unlisted)


def uses_of(nodes: Iterable[Node], queued: Iterable[QueuedResource]) -> list[Use]:
    """Return what uses quota.

    A queued resource uses quota in every state until it is deleted. Where its node exists, the node is counted.
    """
    nodes = list(nodes)
    uses = [
        Use(node.full_name, node.accelerator_type, node.zone, node.preemptible, node.state, node.create_time)
        for node in nodes
    ]
    known = {(node.full_name, node.queued_resource) for node in nodes}
    for one in queued:
        parent = one.full_name.rpartition("/queuedResources/")[0]
        uses += [
            Use(one.full_name, asked.accelerator_type, one.zone, one.spot, one.state, one.created, asked.name)
            for asked in one.nodes
            if (f"{parent}/nodes/{asked.name}", one.name) not in known
        ]
    return uses


class Guard:
    """Decides for one command in which places its nodes may be created, and counts them. All methods are thread-safe.

    Args:
        granted: The grant; None allows every place.
        held: What exists already; not used without a grant.
        now: The present time in UTC.
        look: Returns what exists at a later time.
        clock: Returns the monotonic time in seconds.
    """

    def __init__(
        self,
        granted: Grant | None,
        held: Holdings,
        now: dt.datetime,
        look: Callable[[], Holdings] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grant, self._look, self._clock = granted, look, clock
        self._held, self._now, self._taken = held, now, list[Use]()
        #: For the three above.
        self._lock = threading.Lock()
        #: Held while one thread looks again for all; and when the last look ended.
        self._looking, self._looked = threading.Lock(), -math.inf

    @property
    def _uses(self) -> list[Use]:
        known = {_node_of(use) for use in self._held.uses}
        return [*self._held.uses, *(use for use in self._taken if use.name not in known)]

    def copy(self) -> Guard:
        """Return a guard that counts on its own, to find out where nodes have room without taking it."""
        with self._lock:
            return Guard(self._grant, self._held, self._now)

    def renew(self) -> None:
        """Look again at what exists, and at the time. If the API does not answer, the last answer is used.

        All nodes that wait at the same time share one look: a look of the last `FRESH` seconds is not repeated.
        """
        if self._grant is None or self._look is None:
            return
        with self._looking:
            if self._clock() - self._looked < FRESH:
                return
            held = None
            with contextlib.suppress(ApiError):
                held = self._look()
            with self._lock:
                if held and not held.warnings:
                    self._held = held
                self._now = dt.datetime.now(dt.UTC)
            self._looked = self._clock()

    def places(self, wish: Wish, zones: Sequence[str], *, spot: bool | None) -> tuple[tuple[str, bool], ...]:
        """Return the zones and tiers (whether spot) for one more node, in the order of the grant.

        Args:
            wish: The node; its zone and tier are not used.
            zones: Zones that the user accepts, in the order of preference; empty leaves them to the grant.
            spot: Whether the node has to be a spot node; None leaves it to the grant.

        Raises:
            UsageError: No line covers the node or has room for it, or the grant has ended.
        """
        if self._grant is None:
            return tuple((zone, bool(spot)) for zone in zones)
        with self._lock:
            if there := self._existing(wish, zones):
                # If the tier is another one than requested, the creation says so.
                return ((there[0], there[1] if spot is None else spot),)
            lines = grant.with_room(self._grant, self._uses, wish.accelerator_type, self._now, zones=zones, spot=spot)
        if zones:
            lines.sort(key=lambda line: list(zones).index(line.zone))
        return tuple(dict.fromkeys((line.zone, line.spot) for line in lines))

    def _existing(self, wish: Wish, zones: Sequence[str]) -> tuple[str, bool] | None:
        """Return zone and tier of the node, or of the queued resource that requests it, if there is one already."""
        for node in self._held.nodes:
            if (node.name, node.project) == (wish.name, wish.project) and (not zones or node.zone in zones):
                return node.zone, node.preemptible
        for one in self._held.queued if wish.queued else ():
            asked = [node.accelerator_type for node in one.nodes]
            same = (one.name, one.project, asked) == (wish.name, wish.project, [wish.accelerator_type])
            if same and (not zones or one.zone in zones):
                return one.zone, one.spot
        return None

    def take(self, wish: Wish) -> bool:
        """Return whether the grant has room for the node in its place, and count the node."""
        if self._grant is None:
            return True
        kind = wish.accelerator_type
        with self._lock:
            if self._existing(wish, [wish.zone]):
                return True
            try:
                grant.with_room(self._grant, self._uses, kind, self._now, zones=[wish.zone], spot=wish.spot)
            except UsageError:
                return False
            self._taken.append(_use_of(wish))
        return True

    def release(self, wish: Wish) -> None:
        """Count the node no longer: it could not be created."""
        with self._lock:
            if (use := _use_of(wish)) in self._taken:
                self._taken.remove(use)


def _use_of(wish: Wish) -> Use:
    return Use(wish.full_name, wish.accelerator_type, wish.zone, wish.spot)


def read(settings: Settings, now: dt.datetime) -> Grant | None:
    """Return the fleet's grant, and log a warning if it ends soon; None without a grant, which is told once.

    Raises:
        UsageError: The file has faults.
    """
    found = grant.read(settings.path / grant.FILE)
    if found is None:
        _tell_once(settings)
    elif text := found.warning(now):
        _log.warning("%s", text)
    return found


def remind(settings: Settings, now: dt.datetime) -> None:
    """Log a warning if the fleet's grant ends soon, for a command that creates nothing; faults of the file are logged.

    A faulty file must not keep the user from ending the cost of a node.
    """
    try:
        found = grant.read(settings.path / grant.FILE)
    except UsageError as exc:
        _log.warning("%s", exc)
        return
    if found and (text := found.warning(now)):
        _log.warning("%s", text)


def guard(
    tpu: Tpu,
    settings: Settings,
    granted: Grant | None,
    now: dt.datetime,
    *,
    but: Iterable[str] = (),
    held: Holdings | None = None,
    projects: Sequence[str] = (),
) -> Guard:
    """Return the guard of a command.

    Args:
        tpu: The client; it is not used without a grant.
        settings: The settings of the fleet.
        granted: The result of `read`.
        now: The present time in UTC.
        but: Resource names of nodes and queued resources that are not counted, since the command replaces them.
        held: A result of `look`; None asks the API.
        projects: Further projects whose nodes are counted.

    Raises:
        ApiError: The API refused or did not answer.
        UsageError: A part of the fleet could not be listed, so the rest of the grant is unknown; or a zone of the
            grant does not exist.
    """
    if granted is None:
        return Guard(None, Holdings((), ()), now)
    left = set(but)

    def others(found: Holdings) -> Holdings:
        nodes = tuple(node for node in found.nodes if node.full_name not in left)
        return found._replace(nodes=nodes, queued=tuple(one for one in found.queued if one.full_name not in left))

    held = held or look(tpu, settings, *projects)
    if faults := unknown_zones(tpu, settings, granted, held, *projects):
        what = f"the file has {texts.count(len(faults), 'fault')}"
        raise UsageError(what, where=str(granted.file), fix="correct these lines", details=faults)
    if held.warnings:
        raise UsageError(
            f"how much of the grant is used is unknown: {held.warnings[0]}",
            where=str(granted.file),
            fix="repeat the command; --outside-grant does not ask",
        )
    return Guard(granted, others(held), now, lambda: others(look(tpu, settings, *projects)))


def unknown_zones(tpu: Tpu, settings: Settings, granted: Grant, held: Holdings, *projects: str) -> list[str]:
    """Return a sentence for each line of the grant whose zone none of the fleet's projects has, with its line number.

    The API is asked, since Google adds zones. It is not asked for zones with nodes or queued resources. If it does not
    list the zones of a project, nothing is known to be wrong.

    Args:
        tpu: The client.
        settings: The settings of the fleet.
        granted: The grant.
        held: What exists.
        projects: Further projects.
    """
    there = {node.zone for node in held.nodes} | {one.zone for one in held.queued}
    if all(line.zone in there for line in granted.lines):
        return []

    def zones_of(project: str) -> list[str] | None:
        try:
            return locations(tpu, project)
        except ApiError:
            return None

    listed = tpu.concurrently(zones_of, list(dict.fromkeys((*settings.projects, *projects))))
    known = sorted({zone for zones in listed for zone in zones or ()})
    return [
        f"line {line.number}: no zone is called {shown(line.zone)}{did_you_mean(line.zone, known)}"
        for line in granted.lines
        if None not in listed and line.zone not in {*there, *known}
    ]


def must_be_covered(granted: Grant | None, nodes: Iterable[Node], now: dt.datetime) -> None:
    """Check that the grant covers nodes that exist, as if it had room for each: a recovery might create them again.

    Raises:
        UsageError: No line covers one of the nodes, or the grant has ended.
    """
    if granted is None:
        return
    for node in nodes:
        try:
            grant.with_room(granted, [], node.accelerator_type, now, zones=(node.zone,), spot=node.preemptible)
        except UsageError as exc:
            raise UsageError(
                f"a recovery would create node {node.name} again, outside the grant: {exc.what}",
                where=exc.where,
                fix="leave out --recover, or add --outside-grant: the node is billed",
            ) from exc


def refuse_uncovered(granted: Grant, held: Holdings, plan: Plan, now: dt.datetime) -> None:
    """Check that the grant has room for all nodes of a recovery.

    Args:
        granted: The grant.
        held: What exists.
        plan: The nodes that the recovery brings back.
        now: The present time in UTC.

    Raises:
        UsageError: No line covers one of the nodes or has room for it, or the grant has ended.
    """
    uses = held.uses
    # What came first holds the room: also nodes of the run that are PREEMPTED and listed.
    _, outside = grant.shares(granted, uses)
    inside = {_node_of(use) for use in uses if use not in outside}
    serving = {node.full_name for node in held.nodes if node.state in SERVING_STATES}
    for made in plan.nodes:
        if made.name in serving or (made.name in inside and now < granted.ends):
            continue
        kind, spot = bodies.kind_of(made.body)
        spot = spot or "spot" in plan.queued.get(made.queued, {})
        zone = made.name.split("/")[3]
        others = [use for use in uses if made.name != _node_of(use)]
        grant.with_room(granted, others, kind, now, zones=(zone,), spot=spot)
        uses.append(Use(made.name, kind, zone, spot))


def _node_of(use: Use) -> str:
    """Return the resource name of the node of a use."""
    return f"{use.name.rpartition('/queuedResources/')[0]}/nodes/{use.node}" if use.node else use.name


def _tell_once(settings: Settings) -> None:
    """Log that the fleet has no grant, unless this was done before."""
    told = settings.state_dir / _TOLD
    if told.exists():
        return
    _log.info(
        "%s has no %s, so no node is refused; `tpu_ops grant import` writes the file from Google's e-mail on a grant",
        settings.path,
        grant.FILE,
    )
    try:
        told.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        told.touch()
    except OSError:
        return  # it is told again next time
