"""The capacity of the lab's cloud: quotas, stockouts and the rate of preemptions. By default nothing is limited."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tpu_ops.cloud.accelerators import accelerator_type
from tpu_ops.lab.api.catalogue import ZONES, types_of
from tpu_ops.lab.api.errors import ApiError, Code, invalid
from tpu_ops.lab.api.lab_requests import Kinds, check_fields, check_zone
from tpu_ops.lab.api.names import Location
from tpu_ops.lab.api.wire import Json

if TYPE_CHECKING:
    from tpu_ops.lab.api.records import NodeRecord
    from tpu_ops.lab.api.state import State

#: Longest stockout in seconds, and highest rate of preemptions.
_LONGEST, _FASTEST = 30 * 86400.0, 3.6e6
#: Generation -> the quota's id in messages of the real API; the braces take "Preemptible" for spot nodes.
_QUOTA_IDS = {
    "v2": "TPUV2s{}PerProjectPerZoneForTPUAPI",
    "v3": "TPUV3s{}PerProjectPerZoneForTPUAPI",
    "v4": "TPUV4s{}PodPerProjectPerZoneForTPUAPI",
    "v5litepod": "TPUV5s{}LitepodPerProjectPerZoneForTPUAPI",
    "v5p": "TPUV5P{}PerProjectPerZoneForTPUAPI",
    "v6e": "TPUV6E{}PerProjectPerZoneForTPUAPI",
}

_FIELDS: Kinds = {"quotas": (list,), "stockouts": (list,), "preemption": (dict,)}
_QUOTA: Kinds = {"zone": (str,), "generation": (str,), "spot": (bool,), "chips": (int,)}
_STOCKOUT: Kinds = {"zone": (str,), "type": (str,), "seconds": (int, float)}
_PREEMPTION: Kinds = {"per_hour": (int, float), "seed": (int,)}


@dataclass(frozen=True)
class Quota:
    """The number of chips that each project can have of one generation in one zone, on demand or as spot."""

    zone: str
    generation: str
    spot: bool
    chips: int


@dataclass(frozen=True)
class Stockout:
    """A time in which a zone creates and starts no nodes of a type.

    Attributes:
        zone: The zone.
        type: An accelerator type or a generation; empty for all types.
        until: When it ends, in seconds since the epoch; None if it lasts until another declaration.
    """

    zone: str
    type: str
    until: float | None

    def affects(self, zone: str, name: str) -> bool:
        """Return whether the stockout affects an accelerator type in a zone."""
        return self.zone == zone and self.type in ("", name, name.rpartition("-")[0])


@dataclass(frozen=True)
class Capacity:
    """The limits of the lab's cloud.

    Attributes:
        quotas: The quotas; what no quota names is unlimited.
        stockouts: The stockouts; some may have ended.
        per_hour: Mean number of preemptions of each spot node per hour; 0 for none.
        seed: The same seed and the same node names give the same lifetimes.
        since: When the rate was declared, in seconds since the epoch.
        preempted: Full name of a node -> how many nodes of this name were preempted at this rate.
    """

    quotas: tuple[Quota, ...] = ()
    stockouts: tuple[Stockout, ...] = ()
    per_hour: float = 0.0
    seed: int = 0
    since: float = 0.0
    preempted: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_file(cls, data: Json) -> Capacity:
        """Create a capacity from the JSON of the state file.

        Raises:
            TypeError: A field is missing or unknown.
        """
        quotas = tuple(Quota(**entry) for entry in data.get("quotas", []))
        stockouts = tuple(Stockout(**entry) for entry in data.get("stockouts", []))
        return cls(**{**data, "quotas": quotas, "stockouts": stockouts})

    def json(self) -> Json:
        """Return the capacity as JSON for the state file."""
        return asdict(self)

    def available(self, zone: str, names: Sequence[str]) -> float:
        """Return when a zone has capacity for all these accelerator types, in seconds since the epoch.

        The time is in the past if there is capacity now, and infinite if the stockout has no end.
        """
        ends = [one.until for one in self.stockouts if any(one.affects(zone, name) for name in names)]
        return max((math.inf if until is None else until for until in ends), default=0.0)

    def stockout(self, zone: str, name: str) -> ApiError | None:
        """Return the error of an operation that needs capacity for a node; None if there is capacity now."""
        if self.available(zone, [name]) <= time.time():
            return None
        return ApiError(
            Code.RESOURCE_EXHAUSTED,
            f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
            "offered (see https://cloud.google.com/tpu/docs/regions)",
        )

    def preemption(self, node: NodeRecord) -> float:
        """Return when a spot node is preempted, in seconds since the epoch."""
        if not self.per_hour:
            return math.inf
        drawn = random.Random(f"{self.seed} {node.name} {self.preempted.get(node.name, 0)}")  # noqa: S311 - no secret
        begin = max(datetime.fromisoformat(node.body["createTime"]).timestamp(), self.since)
        return begin + drawn.expovariate(self.per_hour / 3600)

    def count_preemption(self, name: str) -> Capacity:
        """Return the capacity after a preemption: the next node of this name has another lifetime."""
        return replace(self, preempted={**self.preempted, name: self.preempted.get(name, 0) + 1})


def is_spot(body: Json) -> bool:
    """Return whether a node is a spot node or a preemptible one: both use the same quota."""
    scheduling = body.get("schedulingConfig", {})
    return bool(scheduling.get("spot") or scheduling.get("preemptible"))


def _used(state: State) -> Counter[tuple[Location, str, bool]]:
    """Return the chips that use quota, by project and zone, generation, and whether they are spot nodes.

    Every node uses quota until it is deleted, and so does every node that a queued resource in any state requests.
    """
    counts: Counter[tuple[Location, str, bool]] = Counter()
    for node in state.nodes:
        counts.update(_chips(node.location, node.body))
    for record in state.queued:
        for name, body, _ in record.specs():
            made = state.nodes.find(name)
            if made is None or made.queued != record.name:
                counts.update(_chips(record.location, body))
    return counts


def _chips(location: Location, body: Json) -> dict[tuple[Location, str, bool], int]:
    kind = accelerator_type(body["acceleratorType"])
    return {(location, kind.generation, is_spot(body)): kind.chips}


def check_quota(state: State, location: Location, wanted: Sequence[Json]) -> None:
    """Check that a project has quota for new nodes in a zone.

    Raises:
        ApiError: RESOURCE_EXHAUSTED, with the real API's message (seen in marin-community/marin pull request 1612).
    """
    if not state.capacity.quotas:
        return
    used, needed = _used(state), Counter[tuple[Location, str, bool]]()
    for body in wanted:
        needed.update(_chips(location, body))
    for one in state.capacity.quotas:
        key = location, one.generation, one.spot
        if one.zone == location.zone and needed[key] and used[key] + needed[key] > one.chips:
            name = _QUOTA_IDS[one.generation].format("Preemptible" if one.spot else "")
            raise ApiError(
                Code.RESOURCE_EXHAUSTED,
                f"Quota limit '{name}' has been exceeded. Limit: {one.chips} in zone {one.zone}.",
            )


def shown(state: State) -> Json:
    """Return the capacity as the lab's API answers it: quotas with their use, and stockouts that have not ended."""
    capacity, now, used = state.capacity, time.time(), sorted(_used(state).items(), key=lambda entry: entry[0][0].name)
    quotas = [
        {
            **asdict(one),
            "used": {
                location.project: chips
                for (location, *kind), chips in used
                if (location.zone, *kind) == (one.zone, one.generation, one.spot)
            },
        }
        for one in capacity.quotas
    ]
    stockouts = [
        {"zone": one.zone, "type": one.type, "seconds": None if one.until is None else round(one.until - now, 1)}
        for one in capacity.stockouts
        if one.until is None or one.until > now
    ]
    preemption = {"per_hour": capacity.per_hour, "seed": capacity.seed}
    return {"quotas": quotas, "stockouts": stockouts, "preemption": preemption}


def changed(before: Capacity, body: Any) -> Capacity:
    """Return the capacity after a declaration; the parts that the declaration does not name stay.

    Args:
        before: The capacity so far.
        body: The request's JSON.

    Raises:
        ApiError: INVALID_ARGUMENT; the message names the field.
    """
    parts = check_fields(body, _FIELDS, "the capacity")
    if "quotas" in parts:
        quotas = tuple(_quota(entry) for entry in parts["quotas"])
        if len({(one.zone, one.generation, one.spot) for one in quotas}) < len(quotas):
            raise invalid("quotas: two of them have the same zone, generation and tier")
        before = replace(before, quotas=quotas)
    if "stockouts" in parts:
        before = replace(before, stockouts=tuple(_stockout(entry) for entry in parts["stockouts"]))
    if "preemption" in parts:
        fields = check_fields(parts["preemption"], _PREEMPTION, "the preemption")
        rate = fields.get("per_hour", 0)
        if not 0 <= rate <= _FASTEST:
            raise invalid(f"per_hour: {rate} must be between 0 and {_FASTEST:.0f}")
        before = replace(before, per_hour=float(rate), seed=fields.get("seed", 0), since=time.time(), preempted={})
    return before


def _quota(entry: Any) -> Quota:
    fields = {"zone": "", "generation": "", "spot": False, "chips": -1, **check_fields(entry, _QUOTA, "a quota")}
    offered = ZONES[check_zone(fields["zone"])]
    if fields["generation"] not in offered:
        raise invalid(
            f"generation: zone {fields['zone']} does not offer {fields['generation']!r}; it has {', '.join(offered)}"
        )
    if fields["chips"] < 0:
        raise invalid("chips: a quota needs a number of chips, 0 or more")
    return Quota(**fields)


def _stockout(entry: Any) -> Stockout:
    fields = {"zone": "", "type": "", **check_fields(entry, _STOCKOUT, "a stockout")}
    zone, name, seconds = check_zone(fields["zone"]), fields["type"], fields.get("seconds")
    if name not in ("", *ZONES[zone], *types_of(zone)):
        raise invalid(f"type: zone {zone} does not offer {name!r}; it has {', '.join(ZONES[zone])}")
    if seconds is not None and not 0 < seconds <= _LONGEST:
        raise invalid(f"seconds: {seconds} must be more than 0 and at most {_LONGEST:.0f}")
    return Stockout(zone, name, None if seconds is None else time.time() + seconds)
