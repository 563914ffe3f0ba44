#!/bin/sh
# Runs once in the image build: turns a base system with systemd and sshd into a worker of the lab.
set -eu
export SYSTEMD_OFFLINE=1

lib=/usr/local/lib/tpu-lab
chmod 0755 "$lib/init" "$lib/guest_agent.py"

# Base images do not allow services to start; workers have to start theirs.
rm -f /usr/sbin/policy-rc.d

# Each worker creates its own identity at its first boot.
: >/etc/machine-id
rm -f /etc/ssh/ssh_host_* /var/lib/dbus/machine-id
mkdir -p /var/lib/dbus /var/lib/tpu-lab/worker /var/lib/tpu-lab/storage /var/cache/tpu-lab /etc/tpu-lab
ln -s /etc/machine-id /var/lib/dbus/machine-id

install -m 0644 "$lib"/units/*.service "$lib"/units/*.socket /etc/systemd/system/
install -D -m 0644 "$lib/units/ssh.service.conf" /etc/systemd/system/ssh.service.d/tpu-lab.conf
install -D -m 0644 "$lib/units/journald.conf" /etc/systemd/journald.conf.d/tpu-lab.conf
install -D -m 0644 "$lib/units/sshd.conf" /etc/ssh/sshd_config.d/60-tpu-lab.conf

getent group google-sudoers >/dev/null || groupadd --system google-sudoers
echo '%google-sudoers ALL=(ALL:ALL) NOPASSWD:ALL' >/etc/sudoers.d/google_sudoers
chmod 0440 /etc/sudoers.d/google_sudoers
visudo -cqf /etc/sudoers.d/google_sudoers

# Units that a container does not need: consoles, devices, kernel settings, network managers, clock, timed upkeep.
systemctl mask -q \
    getty.target console-getty.service serial-getty@.service getty@.service \
    systemd-udevd.service systemd-udev-trigger.service systemd-udevd-kernel.socket systemd-udevd-control.socket \
    systemd-modules-load.service systemd-networkd.service systemd-networkd.socket systemd-resolved.service \
    systemd-timesyncd.service systemd-remount-fs.service systemd-journald-audit.socket \
    dev-hugepages.mount sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.mount proc-sys-fs-binfmt_misc.automount tmp.mount \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer motd-news.timer
systemctl disable -q ssh.socket 2>/dev/null || true # only Ubuntu 24.04 has this unit
systemctl enable -q ssh.service tpu-lab-guest-agent.service tpu-lab-metadata.socket google-startup-scripts.service
systemctl set-default -q multi-user.target

# The controller's certificate authorities that the distribution does not have.
python3 "$lib/ca.py" "$lib/controller-ca.pem" /usr/local/share/ca-certificates
update-ca-certificates >/dev/null
