"""Nodes and host keys that no API made."""

from __future__ import annotations

import base64
from typing import Any

from tpu_ops.cloud.node import Node


def node(name: str = "pod", zone: str = "us-central2-b", node_id: str = "1", count: int = 2, **fields: Any) -> Node:
    """Return a node of `count` workers."""
    fields = {
        "project": "lab",
        "accelerator_type": "v4-16",
        "state": "READY",
        "internal_ips": tuple(f"10.0.{node_id}.{index}" for index in range(count)),
        "external_ips": tuple(f"34.0.{node_id}.{index}" for index in range(count)),
    } | fields
    return Node(name=name, zone=zone, node_id=node_id, **fields)


def key(seed: str, kind: str = "ssh-ed25519") -> str:
    """Return a host key in base64, of the right form and no one's."""
    name = kind.encode()
    return base64.b64encode(len(name).to_bytes(4, "big") + name + b"\0\0\0\x20" + seed.encode().ljust(32)).decode()
