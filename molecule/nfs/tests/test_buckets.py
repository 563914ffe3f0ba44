"""A bucket of the lab that rclone mounts on both workers, after breaks by hand were repaired."""

from __future__ import annotations

from testinfra.host import Host

PATH = "/mnt/bucket-data"
UNIT = r"'tpu_ops-bucket-mnt-bucket\x2ddata.service'"


def test_a_worker_reads_from_the_bucket_what_the_others_wrote(host: Host) -> None:
    for index in (0, 1):
        assert host.check_output(f"cat {PATH}/from-w{index}").endswith(f"-w{index}")


def test_the_group_of_the_mount_writes_and_others_do_not(host: Host) -> None:
    assert host.check_output(f"stat -c %U:%G:%a {PATH}") == "root:tpu:775"
    assert host.check_output(f"stat -c %U:%G:%a {PATH}/from-w0") == "root:tpu:664"
    index = host.ansible.get_variables()["tpu_worker_index"]
    host.check_output(f"sudo -n -u tpu sh -c 'echo of the group > {PATH}/group-w{index}'")
    assert host.run(f"sudo -n -u nobody sh -c 'echo > {PATH}/group-w{index}'").rc != 0
    assert host.check_output(f"sudo -n -u nobody cat {PATH}/group-w{index}") == "of the group"


def test_a_bucket_is_mounted_after_the_network_is_up(host: Host) -> None:
    assert "network-online.target" in host.check_output(f"systemctl show --property=After {UNIT}")


def test_no_unit_keeps_the_unit_of_runs_loaded(host: Host) -> None:
    host.check_output("sudo -n systemd-run --quiet --wait --unit=tpu-run.service true")


def test_a_bucket_that_left_the_list_is_not_mounted(host: Host) -> None:
    assert "/mnt/left" not in host.check_output("cat /proc/self/mountinfo")
    assert host.check_output("ls /etc/systemd/system | grep ^tpu_ops-bucket-") == UNIT.strip("'")
