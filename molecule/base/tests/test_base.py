"""What keeps a worker healthy while nobody looks: logs stay small, upgrades wait for runs, the clock is right."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Generator

import pytest
from testinfra.host import Host

Ssh = Callable[..., subprocess.CompletedProcess[str]]

RUN = "tpu-run.service"
MIRROR = "https://localhost:8472"


@pytest.fixture
def root(host: Host) -> Generator[Host]:
    """Return the worker as root sees it."""
    with host.sudo():
        yield host


@pytest.fixture
def persistent_journal(root: Host) -> Generator[Host]:
    """Return a worker that keeps its journal on disk, as TPU VMs do and the lab's workers otherwise do not."""
    drop_in = "/etc/systemd/journald.conf.d/zzz-proof.conf"
    root.check_output(
        f"printf '[Journal]\\nStorage=persistent\\n' > {drop_in}"
        " && systemctl restart systemd-journald && journalctl --flush"
    )
    yield root
    root.check_output(f"rm -rf {drop_in} /var/log/journal && systemctl restart systemd-journald && journalctl --flush")


@pytest.fixture
def upgrades(root: Host) -> Generator[Host]:
    """Return a worker whose upgrades leave a mark and do nothing else."""
    for unit in ("apt-daily", "apt-daily-upgrade"):
        drop_in = f"/run/systemd/system/{unit}.service.d"
        command = f"ExecStart=\\nExecStart=/usr/bin/touch /run/proof-{unit}\\n"
        root.check_output(f"mkdir -p {drop_in} && printf '[Service]\\n{command}' > {drop_in}/zz-proof.conf")
    root.check_output("rm -f /run/proof-* && systemctl daemon-reload")
    yield root
    root.check_output(f"systemctl stop {RUN} 2>/dev/null; rm -rf /run/proof-* /run/systemd/system/apt-daily*")
    root.check_output("systemctl daemon-reload")


def test_a_package_that_dpkg_left_half_installed_is_complete(root: Host) -> None:
    assert root.check_output("ls /var/lib/dpkg/updates; dpkg --audit") == ""
    assert root.check_output("dpkg-query --show --showformat '${db:Status-Status}' sed") == "installed"


def test_lists_whose_refresh_failed_were_refreshed_again(root: Host) -> None:
    root.check_output("test /var/lib/apt/periodic/tpu_ops-lists-stamp -nt /srv/proof/modes")


def test_the_time_zone_is_one_wherever_programs_look_for_it(host: Host) -> None:
    assert host.check_output("readlink /etc/localtime; cat /etc/timezone").split() == [
        "/usr/share/zoneinfo/Europe/Zurich",
        "Europe/Zurich",
    ]


def test_the_package_that_was_removed_is_back(host: Host) -> None:
    assert host.run("htop --version").rc == 0


def test_every_file_is_again_what_it_was_before_it_was_broken(root: Host) -> None:
    root.check_output("sha256sum --check --quiet /srv/proof/sums")
    listed = "$(cut -d ' ' -f 3 /srv/proof/modes)"
    assert root.check_output(f"stat -c '%a %U %n' {listed}") == root.check_output("cat /srv/proof/modes")
    assert root.check_output("stat -c %a /etc/tpu_ops") == "755"
    assert not root.file("/etc/tmpfiles.d/tpu_ops-hugepages.conf").exists


def test_libtpu_s_logs_have_a_directory_for_all_users(root: Host) -> None:
    assert root.check_output("stat -c '%a %U' /tmp/tpu_logs") == "1777 root"


def test_needrestart_would_leave_runs_and_people_s_servers_alone(root: Host) -> None:
    read = "eval do { local (@ARGV, $/) = q(/etc/needrestart/conf.d/tpu_ops.conf); <> }; die $@ if $@;"
    asked = "print join q( ), map { my $unit = $_; grep { $unit =~ /$_/ && !$kept{$_} } keys %kept } @ARGV"
    perl = f"our %nrconf; {read} our %kept = %{{$nrconf{{override_rc}}}}; {asked}"
    for name in ("tpu-run", "tpu-jupyter-ada", "tpu-tensorboard-ada"):
        assert root.check_output(f"perl -e '{perl}' {name}.service") != ""
    assert root.check_output(f"perl -e '{perl}' tpu-run.service.d ssh.service") == ""


def test_the_journal_s_service_has_read_the_file_that_was_written_anew(root: Host) -> None:
    written = root.check_output("stat -c %Y /etc/systemd/journald.conf.d/zz-tpu_ops.conf")
    started = 'date +%s -d "$(systemctl show systemd-journald -p ExecMainStartTimestamp --value)"'
    assert int(root.check_output(started)) >= int(written)


def test_the_network_s_authority_is_trusted_beside_the_others(host: Host) -> None:
    assert host.check_output(f"curl --fail --silent --show-error {MIRROR}/Packages").startswith("Package: proof\n")
    script = f"import urllib.request; print(urllib.request.urlopen('{MIRROR}/Packages').status)"
    assert host.check_output(f'python3 -c "{script}"') == "200"


def test_packages_come_from_the_mirror(root: Host) -> None:
    policy = root.check_output("apt-cache policy proof")
    assert "Candidate: 1\n" in policy
    assert f"{MIRROR} ./ Packages" in policy
    fetched = (
        "d=$(mktemp -d) && trap 'rm -rf $d' EXIT && cd $d && apt-get download proof >&2 && dpkg-deb -f *.deb Package"
    )
    assert root.check_output(f"sh -ec {shlex.quote(fetched)}") == "proof"
    assert "file:/srv/proof/origin" in root.file("/etc/apt/sources.list.d/proof.list").content_string.splitlines()[0]


def test_a_log_that_grows_is_rotated_before_its_time(root: Host) -> None:
    entry = "/var/log/proof.log {\\n monthly\\n rotate 2\\n missingok\\n nocreate\\n}\\n"
    root.check_output(f"printf '{entry}' > /etc/logrotate.d/proof")
    try:
        for _ in range(4):
            root.check_output("head -c 2000000 /dev/zero > /var/log/proof.log && systemctl start logrotate.service")
        assert root.check_output("ls /var/log/ | grep proof").split() == ["proof.log.1", "proof.log.2"]
    finally:
        root.check_output("rm -f /etc/logrotate.d/proof /var/log/proof.log*")


def test_rotation_is_looked_at_every_hour(root: Host) -> None:
    assert root.check_output("systemctl is-enabled logrotate.timer") == "enabled"
    assert root.check_output("systemctl is-active logrotate.timer") == "active"
    shown = root.check_output("systemctl show logrotate.timer -p TimersCalendar --value").splitlines()
    assert [line.split(" ;")[0] for line in shown] == ["{ OnCalendar=*-*-* *:00:00"]


def test_the_journal_on_disk_stays_below_its_limit(persistent_journal: Host) -> None:
    written = "head -c 48000000 /dev/urandom | base64 --wrap 30000 | systemd-cat -t proof && journalctl --sync"
    persistent_journal.check_output(written)
    # 16 MB is what the scenario asks; journald counts in whole files.
    assert 4 < int(persistent_journal.check_output("du -sm /var/log/journal | cut -f 1")) <= 17


@pytest.mark.parametrize("unit", ["apt-daily", "apt-daily-upgrade"])
@pytest.mark.parametrize(
    ("service_type", "state"),
    # A run that waits at its barrier counts as well.
    [("exec", "active"), ("notify", "activating")],
)
def test_upgrades_wait_while_a_run_is_on_the_worker(upgrades: Host, unit: str, service_type: str, state: str) -> None:
    upgrades.check_output(f"systemd-run --no-block --unit {RUN} --service-type {service_type} sleep 600")
    waited = f"timeout 20 sh -c 'until [ $(systemctl is-active {RUN}) = {state} ]; do sleep 0.1; done'"
    upgrades.check_output(waited)
    upgrades.check_output(f"systemctl start {unit}.service")
    assert not upgrades.file(f"/run/proof-{unit}").exists
    assert upgrades.run(f"systemctl is-failed {unit}.service").rc != 0
    upgrades.check_output(f"systemctl stop {RUN}; systemctl start {unit}.service")
    assert upgrades.file(f"/run/proof-{unit}").exists


def test_the_clock_s_service_is_enabled_with_the_servers_asked_for(root: Host) -> None:
    assert root.check_output("systemctl is-enabled systemd-timesyncd.service") == "enabled"
    assert "NTP=time.example.org" in root.check_output("systemd-analyze cat-config systemd/timesyncd.conf")


def test_the_time_zone_counts(host: Host) -> None:
    assert host.check_output("date -d '2026-07-01 12:00 UTC' '+%H %Z'") == "14 CEST"


def test_pip_and_uv_use_the_package_index(host: Host, ssh: Ssh) -> None:
    fetched = host.check_output(
        "d=$(mktemp -d) && trap 'rm -rf $d' EXIT && /srv/proof/venv/bin/pip download --no-deps --dest $d proof && ls $d"
    )
    assert f"Looking in indexes: {MIRROR}/simple\n" in fetched
    assert fetched.endswith("\nproof-1-py3-none-any.whl")
    # uv trusts its own authorities, except when a login names others.
    uv = "/srv/proof/venv/bin/uv pip install --no-cache --dry-run --python /srv/proof/venv/bin/python proof"
    planned = ssh(uv, user=os.environ["TPU_OPS_USER"])
    assert planned.stderr.endswith(" + proof==1\n")
    assert ssh(f"env -u SSL_CERT_FILE {uv}", user=os.environ["TPU_OPS_USER"]).returncode != 0


def test_an_installation_has_waited_for_another_one(host: Host) -> None:
    assert host.file("/run/molecule-waited").exists
