"""The caller of a request: the connection of a controller that may end before the answer is sent."""

from __future__ import annotations

import os
import select
import time


class Gone(Exception):
    """The caller has gone and does not wait for the answer."""


class Caller:
    """The caller of a request.

    Args:
        source: The descriptor that the request was read from.
        attended: Whether the end of `source` means that the caller has gone. For a request that a user pipes in, it
            does not.
    """

    def __init__(self, source: int, attended: bool) -> None:
        self._source = source
        self._poll = select.poll()
        if attended:
            self._poll.register(source, select.POLLIN)

    def pause(self, seconds: float) -> None:
        """Wait for some seconds while the caller is there.

        Raises:
            Gone: The caller has gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not self._poll.poll(1000 * left):
                return
            if not os.read(self._source, 4096):
                raise Gone
