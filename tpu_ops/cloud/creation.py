"""Creates several nodes at once, each in the first of its places that has capacity, or through a queued resource."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tpu_ops.cloud import bodies, lifecycle, operations, queued_creation
from tpu_ops.cloud.client import ApiError, Tpu
from tpu_ops.cloud.node import TAKEN_STATES
from tpu_ops.cloud.operations import Progress
from tpu_ops.cloud.remedies import node_deletion
from tpu_ops.cloud.wish import Wish, queued_request, request
from tpu_ops.errors import CloudError, OpsError, UsageError

#: Seconds before a retry if no place has capacity; doubled for each further retry, up to the longest pause.
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0
#: A quota that never has room, in the words of the API: waiting does not help.
_NO_QUOTA = re.compile(r"\blimit(?: of)?:? 0(?:\.0*)?(?!\.?\d)", re.IGNORECASE)


class Claims(Protocol):
    """Decides which places a node may be created in."""

    def take(self, wish: Wish) -> bool:
        """Return whether there is room for the node in its place, and count the node."""

    def release(self, wish: Wish) -> None:
        """Count the node no longer: it could not be created there."""

    def renew(self) -> None:
        """Look again at what exists: time has passed since the last look."""


class Anywhere:
    """Claims without limits."""

    def take(self, wish: Wish) -> bool:
        """Return true."""
        return True

    def release(self, wish: Wish) -> None:
        """Do nothing."""

    def renew(self) -> None:
        """Do nothing."""


class Order(NamedTuple):
    """A node that a user requests.

    Attributes:
        name: Its short name.
        wishes: The node in each place that the user accepts, in the order of preference; at least one.
    """

    name: str
    wishes: tuple[Wish, ...]


class Created(NamedTuple):
    """The result of an order.

    Attributes:
        wish: The node in the place where it was created; after an error, in the last place that was tried.
        outcome: ``created``, ``resumed``, ``already there``, ``begun``, or ``failed``.
        error: The error, if the node is not there.
        seconds: How long it took.
    """

    wish: Wish
    outcome: str
    error: OpsError | None = None
    seconds: float = 0.0


class CreationTerms(NamedTuple):
    """How nodes are created.

    Attributes:
        keys: Lines of the metadata entry ``ssh-keys``.
        wait: Whether to wait until the nodes are READY.
        timeout: Seconds to wait for a node once the API has accepted the request.
        patience: Seconds to retry if no place has capacity; None does not retry.
        first_pause: Seconds before the first retry.
    """

    keys: str
    wait: bool
    timeout: float
    patience: float | None = None
    first_pause: float = FIRST_PAUSE


def create_all(
    tpu: Tpu,
    orders: Sequence[Order],
    terms: CreationTerms,
    *,
    claims: Claims,
    say: Callable[[str], None],
    progress: Callable[[str], Progress],
) -> list[Created]:
    """Create all nodes at once; an error of one does not end the others.

    Args:
        tpu: The client.
        orders: The nodes.
        terms: How they are created.
        claims: Where they may be created.
        say: Called with messages, from several threads.
        progress: Given a node's name, returns the function that is called while the node is created.
    """
    creator = _Creator(tpu, terms, claims, say)

    def one(order: Order) -> Created:
        start, told = time.monotonic(), progress(order.name)
        try:
            wish, outcome = creator.create(order, told)
        except OpsError as exc:
            done = Created(creator.tried.get(order.name, order.wishes[0]), "failed", exc, time.monotonic() - start)
        else:
            done = Created(wish, outcome, seconds=time.monotonic() - start)
        if len(orders) > 1:
            told(done.seconds, done.outcome)
        return done

    if len(orders) == 1:
        # In this thread, an interrupt ends the creation with a message that says what the API is doing.
        return [one(orders[0])]
    with lifecycle.interrupted("the API may be creating some of the nodes, also without this command", lifecycle.AGAIN):
        return tpu.concurrently(one, orders, at_once=max(1, len(orders)))


def lacks_capacity(failure: ApiError) -> bool:
    """Return whether the same request can succeed later or elsewhere: no capacity, or a quota that is used up."""
    if operations.was_preempted(failure):
        return True
    if failure.status == "RESOURCE_EXHAUSTED":
        return not _NO_QUOTA.search(failure.what)
    return failure.status == "FAILED_PRECONDITION" and "capacity" in failure.what.lower()


class _Creator:
    """Creates nodes on the same terms.

    Attributes:
        tried: Name of each node -> the last place that was tried: after an error, the node may exist there.
    """

    def __init__(self, tpu: Tpu, terms: CreationTerms, claims: Claims, say: Callable[[str], None]) -> None:
        self._tpu, self._terms, self._claims, self._say = tpu, terms, claims, say
        self.tried: dict[str, Wish] = {}

    def create(self, order: Order, progress: Progress) -> tuple[Wish, str]:
        """Return the node in the place where it was created, and the outcome.

        Raises:
            CloudError: The API refused, or no place has had capacity.
        """
        begin, pause, patience = time.monotonic(), self._terms.first_pause, self._terms.patience
        while True:
            why = "no place has capacity"
            try:
                # A colleague may have created the node during the last pause.
                if there := self._existing(order):
                    return there, self._in(there, progress)
                wish, result = self._somewhere(order, progress)
                if isinstance(result, str):
                    return wish, result
            except ApiError as exc:
                # On the first try the user is still at the terminal: fail at once.
                if pause == self._terms.first_pause or exc.status not in lifecycle.UNCLEAR:
                    raise
                for wish in order.wishes:
                    self._claims.release(wish)
                result, why = exc, "the API does not answer"
            if patience is None:
                fix = f"{result.fix or 'try another zone'}; --until-capacity keeps trying"
                raise ApiError(result.what, status=result.status, where=result.where, fix=fix)
            # Different pauses keep many nodes from retrying at the same moment.
            seconds = pause * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
            if time.monotonic() - begin + seconds > patience:
                raise result
            self._say(f"node {order.name}: {why}; next try in {seconds:.0f} s")
            if self._tpu.closed.wait(seconds):
                raise result
            pause = min(pause * 2, LONGEST_PAUSE)
            self._claims.renew()

    def _somewhere(self, order: Order, progress: Progress) -> tuple[Wish, str | ApiError]:
        """Try each place once; return the last place tried, and the outcome or the error for missing capacity.

        Raises:
            CloudError: The API refused for another reason.
            UsageError: No place has room in the grant.
        """
        tried: tuple[Wish, ApiError] | None = None
        for wish in order.wishes:
            if not self._claims.take(wish):
                continue
            try:
                return wish, self._in(wish, progress)
            except lifecycle.Refused as exc:
                # Any other error may leave a node, so no other place is tried after it.
                self._claims.release(wish)
                if not lacks_capacity(exc):
                    raise
                tried = wish, exc
                if operations.was_preempted(exc) and self._terms.patience is not None:
                    self._remove_rest(wish, progress)
                if len(order.wishes) > 1 or self._terms.patience is not None:
                    self._say(f"{wish.where}: no capacity ({exc.what})")
        if tried is None:
            what, fix = "the grant has no room left for this node, or has ended", "`tpu_ops grant` shows what uses it"
            raise UsageError(what, where=f"node {order.name}", fix=fix)
        return tried

    def _existing(self, order: Order) -> Wish | None:
        """Return the place of a node or queued resource that exists already; None if there is none.

        Raises:
            CloudError: A queued resource of the name exists, and would create a second node.
        """
        for wish in order.wishes:
            # With only one place, the creation itself finds the node.
            if len(order.wishes) > 1 and lifecycle.find(self._tpu, wish):
                return wish
            if not (found := self._queued(wish)):
                continue
            if wish.queued:
                return wish
            if lifecycle.find(self._tpu, wish) is None:
                raise CloudError(
                    f"a queued resource of this name exists, state {found.state}, and may create the node as well",
                    where=wish.where,
                    fix=f"wait for it with --queued, or delete it first: `{node_deletion(wish.name, wish.zone)}`",
                )
        return None

    def _queued(self, wish: Wish) -> bodies.Queued | None:
        """Return the queued resource of the node's name; None if there is none, or none that this user may see."""
        try:
            return bodies.queued(self._tpu, wish.queue_name)
        except ApiError as exc:
            if wish.queued or exc.status not in ("PERMISSION_DENIED", "UNIMPLEMENTED"):
                raise
            return None

    def _remove_rest(self, wish: Wish, progress: Progress) -> None:
        """Delete a node that was preempted while it was created: it holds its name."""
        node, timeout = lifecycle.find(self._tpu, wish), self._terms.timeout
        # A node in another state was created by somebody else since.
        if node and node.state in TAKEN_STATES:
            lifecycle.delete(
                self._tpu, wish.full_name, node.node_id, what=wish.where, wait=True, timeout=timeout, progress=progress
            )

    def _in(self, wish: Wish, progress: Progress) -> str:
        self.tried[wish.name] = wish
        body, wait, timeout = request(wish, self._terms.keys), self._terms.wait, self._terms.timeout
        if wish.queued:
            queue = queued_request(wish, body)
            return queued_creation.create(self._tpu, wish, queue, wait=wait, timeout=timeout, progress=progress)
        return lifecycle.create(self._tpu, wish, body, wait=wait, timeout=timeout, progress=progress)
