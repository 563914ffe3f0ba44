"""Has the parts below the command line say what they have to say on the way."""

from __future__ import annotations

import logging

from tpu_ops.cli import output


class Said(logging.Handler):
    """Says what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say it."""
        say = output.warning if record.levelno >= logging.WARNING else output.info
        say(record.getMessage())


def listen() -> None:
    """Say what is logged below this package's name, once."""
    log = logging.getLogger("tpu_ops")
    if not any(isinstance(handler, Said) for handler in log.handlers):
        log.addHandler(Said())
        log.setLevel(logging.INFO)
        log.propagate = False
