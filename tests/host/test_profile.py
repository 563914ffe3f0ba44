"""The action `profile`: which servers count as profilers, how they are reached, and what is executed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import profiler, specs
from tpu_ops.host import listeners, profile, rank_record
from tpu_ops.host.caller import Caller, Gone
from tpu_ops.host.listeners import Listener
from tpu_ops.host.store import Store
from tpu_ops.protocol import wire


@pytest.mark.parametrize(
    ("answer", "is_one"),
    [
        (profiler.answer(True), True),
        (profiler.answer(False), False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"unimplemented." * 9, False),
        (b"", False),
        (b"\xff" * 100_000, False),
        (profiler.frame(0, 1, 1, b"\0\0\0\0\0"), True),
        (profiler.frame(7, 0, 0), False),
    ],
)
def test_only_a_profiler_counts_as_one(answer: bytes, is_one: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as link:
                link.sendall(answer)
                link.shutdown(socket.SHUT_WR)
                link.recv(4096)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        assert profile.is_profiler(*listener.getsockname()) is is_one
        server.join(20)
        assert not server.is_alive()


def test_a_server_that_says_nothing_is_no_profiler() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        assert not profile.is_profiler(host, port, 0.2)


def listener(host: str, port: int = 9999) -> Listener:
    return Listener(1, host, port, 1001, 4711)


@pytest.mark.parametrize(
    ("host", "others", "address"),
    [
        ("127.0.0.1", (), "127.0.0.1"),
        ("0.0.0.0", (), "127.0.0.1"),  # noqa: S104 - nothing is bound
        ("10.0.0.5", (), "10.0.0.5"),
        ("::ffff:10.0.0.5", (), "10.0.0.5"),
        ("::1", (), ""),
        ("::", (("127.0.0.1", 8431), ("::1", 9999)), "127.0.0.1"),
        # Another process answers by IPv4.
        ("::", (("127.0.0.1", 9999),), ""),
        ("::", (("::ffff:127.0.0.1", 9999),), ""),
        ("::", (("0.0.0.0", 9999),), ""),  # noqa: S104 - nothing is bound
    ],
)
def test_no_other_socket_is_reached_by_ipv4(host: str, others: tuple[tuple[str, int], ...], address: str) -> None:
    own = listener(host)
    assert listeners.by_ipv4(own, [own, *(listener(*each) for each in others)]) == address


def test_the_ports_are_those_of_the_processes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert profile.listening([os.getpid()])[port] == (os.getpid(), "127.0.0.1")
        assert port not in profile.listening([os.getppid()])


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The runs of a host whose root runs the tests."""
    monkeypatch.setattr(profile, "require_root", lambda: None)
    return Store(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, "run digits-1 is not active on this worker"),
        ({"run_id": "unknown"}, "run unknown is not active on this worker"),
        ({"milliseconds": None}, "the request has no length"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused(store: Store, changes: dict[str, Any], refusal: str) -> None:
    record = rank_record.new_record(specs.good(), specs.myself(), os.getuid())
    store.prepare(record["run_id"], os.getuid(), os.getgid())
    store.write(dict(record, state="succeeded"))
    request = {"protocol": wire.PROTOCOL, "run_id": "digits-1", "milliseconds": 500, **changes}
    with pytest.raises(wire.Refused, match=refusal):
        profile.profile(request, store, Caller(0, attended=False))


def test_a_profile_that_nobody_waits_for_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    source, caller = os.pipe()
    with os.fdopen(source, "rb", buffering=0):
        profile.require_caller(Caller(source, attended=True), str(folder))
        assert folder.exists()
        os.close(caller)
        with pytest.raises(Gone):
            profile.require_caller(Caller(source, attended=True), str(folder))
    assert not folder.exists()


def test_the_command_is_that_of_jax() -> None:
    assert profile.command_line("/env/bin/python", "127.0.0.1", 9999, 5000, "/tmp/x") == [
        *("/env/bin/python", "-m", "jax.collect_profile", "9999", "5000"),
        *("--log_dir", "/tmp/x", "--no_perfetto_link", "--host", "127.0.0.1"),
    ]


def test_the_python_of_a_run_is_that_of_its_process(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "PYTHONPATH": "/modules", "SECRET": "hush"}
    (tmp_path / "python").symlink_to(sys.executable)
    script = "print('ready', flush=True); input()"
    with subprocess.Popen(
        ["python", "-c", script], executable=sys.executable, env=environ, stdin=-1, stdout=-1, text=True
    ) as one:
        assert one.stdout
        one.stdout.readline()
        known = profile.variables(one.pid)
        assert known == {"PATH": str(tmp_path), "PYTHONPATH": "/modules"}
        assert profile.python_of(one.pid, known) == str(tmp_path / "python")
        one.communicate("\n")
