"""Which device a data disk is on the workers, and what is mounted from it."""

from __future__ import annotations

import pytest

from tpu_ops.errors import UsageError
from tpu_ops.fleet.devices import mount_points, new_device, of_all, parsed

ONE, TWO, THREE = (f"google-persistent-disk-{number}" for number in (1, 2, 3))

#: As a worker with a boot disk, a mounted data disk (once more as a bind mount), a blank one, and a partition says it.
SAID = r"""disk google-persistent-disk-0 8 0
disk google-persistent-disk-1 8 10
disk google-persistent-disk-2 8 20
disk google-persistent-disk-2-part1 8 21
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 8:16 / /mnt/my\040data rw,relatime shared:9 - ext4 /dev/sdb rw
31 22 8:16 /sub /srv rw,relatime shared:9 - ext4 /dev/sdb rw
32 22 0:21 / /proc rw - proc proc rw
"""


def test_the_devices_of_a_worker_are_read_with_their_mount_points():
    assert parsed(SAID) == {ONE: ("/mnt/my data", "/srv"), TWO: ()}
    assert parsed("") == {}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {ONE: ()}, ONE),
        ({ONE: ()}, {ONE: (), TWO: ()}, TWO),
        # Nothing is new: an earlier command attached the disk, or mounted it as well.
        ({ONE: ("/a",), TWO: ()}, {ONE: ("/a",), TWO: ()}, TWO),
        ({ONE: ("/mnt/data",), TWO: ()}, {ONE: ("/mnt/data",), TWO: ()}, ONE),
        # Somebody else attaches a disk at the same time: the device is not guessed.
        ({}, {ONE: (), TWO: ()}, "google-persistent-disk-1, google-persistent-disk-2"),
        ({ONE: (), TWO: (), THREE: ()}, {ONE: (), TWO: (), THREE: ()}, "google-persistent-disk-3"),
        ({ONE: ("/a",)}, {ONE: ("/a",)}, "not known"),
        ({}, {}, "no data disk"),
    ],
)
def test_a_device_is_found_or_not_guessed(before, after, expected):
    if expected in (ONE, TWO):
        assert new_device(before, after, "/mnt/data") == expected
        return
    with pytest.raises(UsageError, match=expected):
        new_device(before, after, "/mnt/data")


def test_a_disk_has_to_be_the_same_device_on_all_workers():
    assert of_all({"pod-w0": ONE, "pod-w1": ONE}) == ONE
    with pytest.raises(UsageError, match=f"pod-w1: {TWO}"):
        of_all({"pod-w0": ONE, "pod-w1": TWO})


@pytest.mark.parametrize(
    ("devices", "attached", "named", "expected"),
    [
        ({ONE: ()}, 1, [], []),
        ({ONE: ("/a",)}, 1, [], ["/a"]),
        ({ONE: (), TWO: ()}, 2, [], []),
        ({ONE: ("/a",), TWO: ("/b",)}, 2, ["/b"], ["/b"]),
        ({ONE: ("/a",)}, 2, ["/gone"], []),
        ({ONE: ("/a",), TWO: ()}, 2, [], None),
    ],
)
def test_only_the_mount_points_of_the_disk_are_unmounted(devices, attached, named, expected):
    found = {"pod-w0": devices, "pod-w1": {}}
    if expected is not None:
        assert mount_points(found, attached, named) == expected
        return
    with pytest.raises(UsageError, match="several disks"):
        mount_points(found, attached, named)
