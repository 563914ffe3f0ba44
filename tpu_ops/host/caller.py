"""Who has sent a request, and whether anybody still waits for its answer."""

from __future__ import annotations

import os
import select
import time


class Gone(Exception):
    """Whoever asked has gone, and nobody waits for the answer."""


class Caller:
    """Whoever has sent a request.

    Args:
        source: The descriptor that it came from.
        attended: Whether its end means that they have gone. Who pipes a request in by hand has closed it before.
    """

    def __init__(self, source: int, attended: bool) -> None:
        self._source = source
        self._poll = select.poll()
        if attended:
            self._poll.register(source, select.POLLIN)

    def pause(self, seconds: float) -> None:
        """Wait as long as this.

        Raises:
            Gone: They have gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not self._poll.poll(1000 * left):
                return
            if not os.read(self._source, 4096):
                raise Gone
