"""A run's spec as the host program gets it, and the person it is for: who runs the tests."""

from __future__ import annotations

import os
import pwd
from typing import Any

from tpu_ops.host import person


def good_net(**changes: Any) -> dict[str, Any]:
    """Return how a rank reaches the others, with changes."""
    return {"address": "10.0.0.1", "hub": "10.0.0.0", "port": 8500, "key": "0f" * 32} | changes


def good(**changes: Any) -> dict[str, Any]:
    """Return a spec that can be carried out, with changes."""
    found: dict[str, Any] = {
        "run_id": "digits-1",
        "attempt": 1,
        "rank": 1,
        "world_size": 4,
        "node": "pod",
        "slice": 0,
        "slices": 1,
        "worker": "pod-w1",
        "workers": ["pod-w0", "pod-w1", "pod-w2", "pod-w3"],
        "argv": ["python", ""],
        "env": {"A": "1"},
        "secrets": {"S": "hush"},
        "user": "",
        "cwd": "",
        "venv": "",
        "grace_failure": 10,
        "grace_stop": 30.0,
        "barrier": 60,
        "lease": 15.0,
        "exit_skew": 300,
        "net": good_net(),
        "chips": 0,
        "force": False,
        "code_digest": "",
        "started_from": "x",
    }
    return found | changes


def myself() -> person.Person:
    """Return who runs the tests."""
    return person.Person(pwd.getpwuid(os.getuid()))
