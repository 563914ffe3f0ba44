"""The accelerator table says how many workers and chips a type has."""

import pytest

from tpu_ops.cloud.accelerators import accelerator_type, catalogue


@pytest.mark.parametrize(
    ("name", "workers", "chips", "chips_per_worker", "topology"),
    [
        ("v2-8", 1, 4, 4, "2x2"),
        ("v2-32", 4, 16, 4, "4x4"),
        ("v2-512", 64, 256, 4, "16x16"),
        ("v3-64", 8, 32, 4, "4x8"),
        ("v3-2048", 256, 1024, 4, "32x32"),
        ("v4-8", 1, 4, 4, "2x2x1"),
        ("v4-16", 2, 8, 4, "2x2x2"),
        ("v4-32", 4, 16, 4, "2x2x4"),
        ("v4-4096", 512, 2048, 4, "8x16x16"),
        ("v5litepod-1", 1, 1, 1, "1x1"),
        ("v5litepod-8", 1, 8, 8, "2x4"),
        ("v5litepod-16", 4, 16, 4, "4x4"),
        ("v5litepod-256", 64, 256, 4, "16x16"),
        ("v5p-8", 1, 4, 4, "2x2x1"),
        ("v5p-128", 16, 64, 4, "4x4x4"),
        ("v5p-12288", 1536, 6144, 4, "16x16x24"),
        ("v6e-4", 1, 4, 4, "2x2"),
        ("v6e-8", 1, 8, 8, "2x4"),
        ("v6e-256", 64, 256, 4, "16x16"),
    ],
)
def test_a_type_has_the_documented_size(name, workers, chips, chips_per_worker, topology):
    found = accelerator_type(name)
    assert (found.workers, found.chips, found.chips_per_worker, found.topology) == (
        workers,
        chips,
        chips_per_worker,
        topology,
    )


@pytest.mark.parametrize(
    "name", ["", "v4", "v4-", "v4-0", "v4-12", "v9-8", "v6e-10", "V4-8", "v4-8 ", "v4-8\n", "tpu7x-8"]
)
def test_another_name_is_refused_and_quoted(name):
    with pytest.raises(ValueError, match="accelerator type") as caught:
        accelerator_type(name)
    assert repr(name) in str(caught.value)


def test_every_type_of_the_catalogue_fills_its_workers_and_its_topology():
    for found in catalogue():
        sides = [int(side) for side in found.topology.split("x")]
        product = 1
        for side in sides:
            product *= side
        assert product == found.chips == found.workers * found.chips_per_worker, found
