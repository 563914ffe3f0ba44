"""The properties of a node that only its creation sets, and its metadata: what a declared node is compared with.

They are not part of `Node`, which is published and cached, since values of the metadata may be secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_ops.errors import printable


@dataclass(frozen=True)
class Setup:
    """How a node was set up.

    Attributes:
        network: Name of the network, as the API writes it; empty if unknown.
        subnetwork: Name of the subnetwork, as the API writes it; empty if unknown.
        internal_only: Whether the workers have no external addresses.
        scopes: Scopes of the service account.
        metadata: The entries of the metadata; values may be secret.
    """

    network: str = ""
    subnetwork: str = ""
    internal_only: bool = False
    scopes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)


def parsed(raw: Any) -> Setup:
    """Convert a raw google.cloud.tpu.v2.Node."""
    several = raw.network_configs
    network = several[0] if several and not raw.HasField("network_config") else raw.network_config
    return Setup(
        network=printable(network.network),
        subnetwork=printable(network.subnetwork),
        internal_only=not network.enable_external_ips,
        scopes=tuple(map(printable, raw.service_account.scope)),
        metadata=dict(raw.metadata),
    )
