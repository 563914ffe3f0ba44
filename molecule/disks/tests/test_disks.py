"""What is on the disks after a reboot, breaks by hand, refusals, and one removal that was undone."""

from __future__ import annotations

from testinfra.host import Host


def run(host: Host, command: str) -> str:
    done = host.run(f"sudo -n sh -c '{command}'")
    assert done.rc == 0, done.stderr + journal(host)
    return str(done.stdout).strip()


def journal(host: Host) -> str:
    return str(host.run("sudo -n journalctl --no-pager -o cat -n 30 -u '*.mount'").stdout)


def owns(host: Host) -> bool:
    """Return whether this is the worker with disks of its own."""
    return bool(host.ansible.get_variables()["tpu_node"].startswith("disks-"))


def test_disks_are_mounted_by_uuid_and_at_boot(host: Host) -> None:
    units = ["mnt-data.mount", r"srv-old\\x2ddata.mount"] if owns(host) else ["mnt-dataset.mount"]
    for unit in units:
        shown = run(host, f'systemctl show -p What -p ActiveState "{unit}"; systemctl is-enabled "{unit}"').splitlines()
        assert "ActiveState=active" in shown
        assert "enabled" in shown
        assert any(line.startswith("What=/dev/") for line in shown), shown
        text = run(host, f'cat "/etc/systemd/system/{unit}"')
        assert "What=/dev/disk/by-uuid/" in text
        assert "relatime" not in text


def test_existing_files_are_kept_and_mounts_have_their_options(host: Host) -> None:
    if owns(host):
        assert run(host, "cat /mnt/data/kept /srv/old-data/kept") == "kept\nkept"
        assert run(host, "stat -c %U:%a /mnt/data") == "tpu:2775"
        options = set(run(host, "findmnt -no OPTIONS /mnt/data").split(","))
        assert {"noatime", "discard"} <= options
        assert "nosuid" not in options


def test_a_shared_disk_is_read_by_every_worker_and_written_by_none(host: Host) -> None:
    if not owns(host):
        assert run(host, "cat /mnt/dataset/data-set") == "everybody reads this"
        options = run(host, "findmnt -no OPTIONS /mnt/dataset").split(",")
        assert {"ro", "norecovery"} <= set(options)
        assert host.run("sudo -n touch /mnt/dataset/more").rc != 0


def test_refused_mounts_have_no_unit_and_their_disk_is_unchanged(host: Host) -> None:
    assert run(host, "ls /etc/systemd/system/*.mount").count("refused") == 0
    if owns(host):
        assert run(host, "wipefs -n /dev/disk/by-id/google-persistent-disk-4") == ""
