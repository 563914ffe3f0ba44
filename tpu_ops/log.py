"""What the package says on the way, by the standard library's logging, imported once there is something to say.

To import it takes longer than a session with a worker does, and mostly nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable

_hear: Callable[[], None] | None = None


class Log:
    """Stands for the logger of a name, whose methods these are."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, text: str, *values: object) -> None:
        """Say what is going on."""
        self._say("info", text, values)

    def warning(self, text: str, *values: object) -> None:
        """Say what may be wrong."""
        self._say("warning", text, values)

    def error(self, text: str, *values: object) -> None:
        """Say what is wrong."""
        self._say("error", text, values)

    def exception(self, text: str, *values: object) -> None:
        """Say what failed, with the exception that is being handled."""
        self._say("exception", text, values)

    def _say(self, method: str, text: str, values: tuple[object, ...]) -> None:
        # Imported here: see above.
        import logging

        if _hear is not None:
            _hear()
        getattr(logging.getLogger(self._name), method)(text, *values)


def heard_by(hear: Callable[[], None] | None) -> None:
    """Have this called each time before something is said, so that it sees to somebody listening; None ends that."""
    global _hear  # noqa: PLW0603 - one process, one who listens
    _hear = hear
