"""Script that runs on all workers of a slice at the same time: it computes an all-reduce over all devices and times it.

The argument is a JSON object: `workers` (number of workers in the slice), `patience` (seconds to wait for the other
workers), `bytes` (size of each device's summand), `rounds` (number of timed all-reduces), `cpu_devices` (number of CPU
devices that replace a worker's chips; 0 uses the devices that JAX finds). The script prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

#: The summands repeat after this many devices and elements. So the sums are whole numbers below 2**24 for any slice,
#: which float32 holds exactly in whatever order they are added.
DEVICE_CYCLE, ELEMENT_CYCLE = 61, 7


def main() -> None:
    """Run the test that the argument describes."""
    asked = json.loads(sys.argv[1])
    if asked["cpu_devices"]:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={asked['cpu_devices']}"
    # JAX is installed on the workers only.
    import jax  # type: ignore[import-not-found]
    import numpy as np  # type: ignore[import-not-found]
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # type: ignore[import-not-found]

    if asked["workers"] > 1:
        jax.distributed.initialize(initialization_timeout=asked["patience"])
    devices = jax.devices()
    # Counts chips by their position in the slice: a chip of an older generation has two cores, which are two devices
    # with the same position. CPU devices have no position, so each counts as a chip.
    places = {(getattr(device, "slice_index", 0), *getattr(device, "coords", [device.id])) for device in devices}
    pattern = np.arange(asked["bytes"] // 4) % ELEMENT_CYCLE + 1

    def rows(index: tuple[slice, ...]) -> Any:
        """Return the summands of the devices with these indices, one row for each device."""
        numbers = np.arange(*index[0].indices(len(devices))) % DEVICE_CYCLE + 1
        return (numbers[:, None] * pattern[None, :]).astype(np.float32)

    mesh = Mesh(np.array(devices), ("devices",))
    split, whole = NamedSharding(mesh, PartitionSpec("devices")), NamedSharding(mesh, PartitionSpec())
    given = jax.make_array_from_callback((len(devices), len(pattern)), split, rows)
    add_up = jax.jit(lambda values: values.sum(axis=0), out_shardings=whole)
    found = add_up(given).block_until_ready()
    expected = ((np.arange(len(devices)) % DEVICE_CYCLE + 1).sum() * pattern).astype(np.float32)
    seconds = []
    for _ in range(asked["rounds"]):
        start = time.monotonic()
        add_up(given).block_until_ready()
        seconds.append(time.monotonic() - start)
    report = {
        "rank": jax.process_index(),
        "workers": jax.process_count(),
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "chips": len(places),
        "devices": len(devices),
        "right": all(np.array_equal(shard.data, expected) for shard in found.addressable_shards),
        "bytes": found.nbytes,
        "seconds": seconds,
        "jax": jax.__version__,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
