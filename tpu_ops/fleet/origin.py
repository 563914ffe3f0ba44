"""Reads a fleet's nodes from their source: the API or a published snapshot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tpu_ops.cloud import compute, forms
from tpu_ops.cloud.client import Tpu, connect
from tpu_ops.cloud.listing import Listing, list_nodes
from tpu_ops.cloud.node import Node
from tpu_ops.config import Settings
from tpu_ops.errors import CloudError, UsageError
from tpu_ops.fleet import selection
from tpu_ops.fleet.publishing import published, sources
from tpu_ops.fleet.publishing.published import Seen
from tpu_ops.fleet.state import Files, Snapshot, Stored, question_of
from tpu_ops.ssh import guest_attributes

#: Uses the API's client while the nodes are listed.
Job = Callable[[Tpu], object]


@contextmanager
def api(settings: Settings) -> Iterator[Tpu]:
    """Connect to the API that these settings name, for the length of a `with` block.

    Raises:
        CloudError: There are no credentials for the API.
    """
    with ExitStack() as held:
        try:
            tpu = held.enter_context(connect(settings.endpoint, settings.request_timeout, settings.auth))
        except CloudError as exc:
            if source := source_of(settings):
                exc.fix = (
                    "log in (gcloud auth application-default login), or ask a colleague with credentials to run "
                    f"this; without credentials, this fleet can only be read, from {sources.shown(source)}"
                )
            raise
        yield tpu


@contextmanager
def compute_api(settings: Settings, patience: float = math.inf) -> Iterator[compute.Compute]:
    """Connect to the Compute Engine API, for the length of a `with` block.

    Args:
        settings: The fleet's settings.
        patience: The most seconds for one call, if the settings allow more.

    Raises:
        UsageError: Only one of the two endpoints is set.
        CloudError: There are no credentials for the API.
    """
    if bool(settings.endpoint) != bool(settings.rest_endpoint):
        # Otherwise nodes would be read from one service, and disks of the same name from another.
        lacking = "TPU_OPS_REST_ENDPOINT" if settings.endpoint else "TPU_OPS_ENDPOINT"
        raise UsageError(
            "Compute Engine needs both endpoints, or none for the real services",
            where=f"environment variable {lacking}",
            fix=f"set {lacking}, or unset the other endpoint",
        )
    with compute.connect(settings.rest_endpoint, min(settings.request_timeout, patience), settings.auth) as found:
        yield found


def source_of(settings: Settings) -> str:
    """Return the source of the published snapshot that a fleet is read from; empty if the API is used.

    The settings take precedence over the last `tpu_ops refresh --from`.

    Raises:
        UsageError: The source in the settings is invalid.
    """
    return _source(settings, Files(settings.state_dir).read())


def _source(settings: Settings, stored: Stored | None) -> str:
    if settings.snapshot:
        return sources.named(settings)
    return stored.snapshot.source if stored else sources.API


def ask(
    settings: Settings,
    files: Files,
    source: str | None,
    *,
    verify_keys: bool = False,
    learn: bool = True,
    beside: Sequence[Job] = (),
) -> Seen:
    """Ask the API for a fleet's nodes and host keys, or read them from the published snapshot.

    If the API is asked, the functions ``beside`` are called with its client while the nodes are listed.
    """
    stored = files.read()
    chosen = _source(settings, stored) if source is None else source
    if chosen:
        return published.read(settings, chosen, learn=learn)
    old = stored.answer(question_of(settings)) if stored else None
    return _ask_api(settings, files, old, verify_keys=verify_keys, learn=learn, beside=beside)


def _ask_api(
    settings: Settings,
    files: Files,
    old: Snapshot | None,
    *,
    verify_keys: bool,
    learn: bool,
    beside: Sequence[Job],
) -> Seen:
    """Ask the API for the nodes, and for the guest attributes that are not known yet."""
    if not settings.projects:
        # Required here only: a published snapshot names its projects itself.
        raise UsageError(
            "no project is set, and the API needs one",
            where=f"{settings.file}, key 'projects'",
            fix="list your Google Cloud project ids there, or set TPU_OPS_PROJECT; without cloud credentials, read a "
            "published snapshot: `tpu_ops refresh --from SOURCE`, key `snapshot` or TPU_OPS_SNAPSHOT "
            "(docs/members.md)",
        )
    asked_at = time.time()
    with api(settings) as tpu:
        listing = _list(tpu, settings, beside)
        nodes = with_instance_names(listing.nodes, old.nodes if old else ())
        learned = guest_attributes.Learned()
        if learn:
            known, first = files.host_keys()
            # Treat keys that were trusted on first contact as unknown, to compare them with published keys.
            vouched = {alias: keys for alias, keys in known.items() if alias not in first}
            workers = selection.reached(settings, nodes)
            asked = guest_attributes.wanted(workers, vouched, verify=verify_keys, instance_names=settings.iap)
            learned = guest_attributes.fetch(tpu, asked, instance_names=settings.iap)
            learned = guest_attributes.of_the_same(tpu, asked, learned, known)
    nodes = tuple(_named(node, learned.instance_names.get(node.full_name, ())) for node in nodes)
    # Drop invalid names of projects and zones: readers of a published snapshot would reject the whole snapshot.
    unanswered = tuple(place for place in listing.unanswered if forms.places([[*place]]))
    return Seen(asked_at, nodes, unanswered, learned, listing.warnings)


def _list(tpu: Tpu, settings: Settings, beside: Sequence[Job]) -> Listing:
    """List the nodes, and call the functions ``beside`` at the same time."""
    found: list[Listing] = []

    def nodes(tpu: Tpu) -> None:
        strict = settings.strict_permissions
        found.append(list_nodes(tpu, settings.projects, settings.zones, strict_permissions=strict))

    tpu.concurrently(lambda job: job(tpu), [nodes, *beside])
    return found[0]


def with_instance_names(listed: Iterable[Node], others: Iterable[Node]) -> tuple[Node, ...]:
    """Return the listed nodes; missing instance names are taken from the node with the same id among the others."""
    known = {node.node_id: node.instance_names for node in others if node.instance_names}
    return tuple(node if node.instance_names else _named(node, known.get(node.node_id, ())) for node in listed)


def _named(node: Node, names: tuple[str, ...]) -> Node:
    """Return the node with these instance names of its workers if the node lists as many workers, else unchanged.

    The API lists a node without workers while the node is being stopped, for example.
    """
    return node._replace(instance_names=names) if names and len(names) == node.worker_count else node


def with_unanswered(
    listed: tuple[Node, ...], unanswered: tuple[tuple[str, str], ...], old: Snapshot | None
) -> tuple[Node, ...]:
    """Add the last known nodes of projects and zones that could not be listed: such nodes probably still exist."""
    places, names = set(unanswered), {node.full_name for node in listed}
    kept = [
        node
        for node in (old.nodes if old else ())
        if node.full_name not in names and {(node.project, node.zone), (node.project, "-")} & places
    ]
    return tuple(sorted((*listed, *kept), key=lambda node: node.full_name))
