"""Sends notices of the end of a run to a command of the user or to a webhook."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu_ops.errors import UsageError

#: Timeout of a command in seconds.
COMMAND_LIMIT = 60.0
#: Seconds for all webhooks together: names, all addresses, and answers.
WEBHOOK_LIMIT = 10.0
_NO_ANSWER = f"no answer within {WEBHOOK_LIMIT:g} s"


@dataclass(frozen=True)
class Notice:
    """The end of a run.

    Attributes:
        run_id: The run.
        state: Its state, as in `outcomes.run_state`.
        exit_code: The exit code of the command that followed the run.
        targets: The nodes of the run.
        duration: Duration of the last attempt in seconds; None if no worker reported it.
        reason: Why the run failed; empty if it did not fail or the reason is unknown.
    """

    run_id: str
    state: str
    exit_code: int
    targets: Sequence[str]
    duration: float | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the notice as JSON, with the key ``text`` that Slack and similar services show."""
        lasted = "" if self.duration is None else f" after {self.duration:.0f} s"
        text = f"run {self.run_id} on {', '.join(self.targets)}: {self.state}{lasted}"
        return {**asdict(self), "text": f"{text}: {self.reason}" if self.reason else text}

    def environment(self) -> dict[str, str]:
        """Return the variables of a command."""
        return {
            "TPU_OPS_RUN_ID": self.run_id,
            "TPU_OPS_RUN_STATE": self.state,
            "TPU_OPS_RUN_EXIT_CODE": str(self.exit_code),
            "TPU_OPS_RUN_TARGETS": ",".join(self.targets),
            "TPU_OPS_RUN_DURATION": "" if self.duration is None else f"{self.duration:.0f}",
        }


def _is_url(to: str) -> bool:
    return to.lower().startswith(("http://", "https://"))


def check(to: str) -> None:
    """Check the value of --notify.

    Raises:
        UsageError: It is empty, a URL without a host, or a URL with a password before its host.
    """
    if not to.strip():
        raise UsageError("the value is empty", where="--notify", fix="name a command, or a URL that begins with https")
    if _is_url(to):
        try:
            parts = urllib.parse.urlsplit(to)
            host = parts.hostname
        except ValueError:
            host = None
        if host and "@" in parts.netloc:
            # urllib would refuse it at the end of the run, in a message with the password.
            what = "a name or password before the host is not supported"
            fix = "send it with a command, as in curl --netrc, or give the URL without it"
            raise UsageError(what, where="--notify", fix=fix)
        if not host or not to.isprintable() or " " in to:
            raise UsageError("the URL is invalid", where="--notify", fix="correct it; its form is https://HOST/PATH")


def named(to: str) -> str:
    """Return the receiver for messages: of a URL only the host, since the path is often a secret."""
    return f"webhook of {urllib.parse.urlsplit(to).hostname}" if _is_url(to) else f"command {to!r}"


def send(notice: Notice, receivers: Sequence[str]) -> list[str]:
    """Send a notice to commands and URLs; return for each what failed, or an empty text."""
    body, told = json.dumps(notice.to_json()), dict.fromkeys(filter(_is_url, receivers), _NO_ANSWER)

    def post(url: str) -> None:
        told[url] = _post(body, url)

    # The timeout of urllib is that of one step: of a connection to one address, or of one part of an answer. At the end
    # of this process, daemon threads are not awaited.
    threads = [threading.Thread(target=post, args=(url,), daemon=True) for url in told]
    until = time.monotonic() + WEBHOOK_LIMIT
    for thread in threads:
        thread.start()
    called = {to: _call(notice, body, to) for to in receivers if not _is_url(to)}
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [{**told, **called}[to] for to in receivers]


def _call(notice: Notice, body: str, command: str) -> str:
    try:
        # The output goes to standard error, since --json may use standard output.
        process = subprocess.Popen(  # noqa: S602 - the user's own command line, on the user's machine
            command,
            shell=True,
            stdin=subprocess.PIPE,
            text=True,
            stdout=2,
            env={**os.environ, **notice.environment()},
            start_new_session=True,
        )
    except OSError as exc:
        return exc.strerror or str(exc)
    with process:
        try:
            process.communicate(body, COMMAND_LIMIT)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"ended, since it was not done after {COMMAND_LIMIT:g} s"
        except BaseException:  # also after Ctrl-C, which does not reach the command's own session
            _end(process)
            raise
    return f"exit code {process.returncode}" if process.returncode else ""


def _end(process: subprocess.Popen[str]) -> None:
    """End a command with all processes of its session's group: the shell may wait for another program."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, since urllib would request the new URL with GET and without the notice."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, so that urllib raises an HTTPError."""


def _post(body: str, url: str) -> str:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body.encode(), headers)  # noqa: S310 - http or https, by `_is_url`
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=WEBHOOK_LIMIT):
            return ""
    except urllib.error.HTTPError as exc:
        return f"HTTP {exc.code} {exc.reason}"
    except urllib.error.URLError as exc:
        return str(exc.reason)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        return str(exc) or type(exc).__name__
