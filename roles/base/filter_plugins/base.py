"""Filters of the role base; no effects, so that their tests are tables."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

#: Beginnings of accelerator types before v5e. JAX asks for transparent hugepages on v5e and newer
#: (jax/_src/cloud_tpu_init.py, JAX 0.10.2).
EARLIER = ("v2-", "v3-", "v4-")

#: Packages of time services -> their systemd units. Google's images contain chrony.
CLOCKS = {
    "chrony": "chrony.service",
    "ntpsec": "ntpsec.service",
    "ntp": "ntp.service",
    "openntpd": "openntpd.service",
    "systemd-timesyncd": "systemd-timesyncd.service",
}

#: One certificate in a file, found with the same pattern as in the module ca_certificates.
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def certificate_paths(names: list[str], directory: str) -> list[str]:
    """Given base_ca_certificates, return the paths on the controller; relative paths start at `directory`."""
    return [str(Path(directory, _expanded(name))) for name in names]


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # There is no account NAME for ~NAME, so the file does not exist either.
        return Path(name)


def certificate_faults(paths: list[str]) -> list[str]:
    """Given the result of `certificate_paths`, return a fault for each file that OpenSSL cannot use."""
    return [
        f"base_ca_certificates[{position}]: {path} on this machine: {fault}; name a PEM file"
        for position, path in enumerate(paths)
        if (fault := _certificate_fault(Path(path)))
    ]


def _certificate_fault(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as exc:
        return str(exc.strerror)
    if data.startswith(b"$ANSIBLE_VAULT;"):
        return ""  # Ansible decrypts this vault file later, and then the module ca_certificates checks its content.
    certificates = PEM.findall(data)
    if not certificates:
        return "it contains no certificate"
    try:
        text = b"\n".join(certificates).decode("ascii", "replace")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        return "a certificate in it is damaged"
    return ""


def hugepages_wanted(setting: str, accelerator_type: str) -> str:
    """Given base_hugepages, return the setting for this accelerator type; empty to leave the kernel's setting."""
    if setting != "auto":
        return "" if setting == "keep" else setting
    return "always" if accelerator_type and not accelerator_type.startswith(EARLIER) else ""


def clock(units: dict[str, dict[str, str]]) -> dict[str, str]:
    """Given the worker's units, return the package and unit of its time service; without one, of the one to install."""
    package = next((package for package, unit in CLOCKS.items() if unit in units), "systemd-timesyncd")
    return {"package": package, "unit": CLOCKS[package]}


def clock_faults(servers: list[str], sync: bool, package: str, readers: list[str]) -> list[str]:
    """Return the reason why base_ntp_servers would have no effect, as a list of one message; empty if it has an effect.

    Args:
        servers: base_ntp_servers.
        sync: base_time_sync.
        package: The package of the time service.
        readers: Files of chrony's configuration that mention /etc/chrony/sources.d.
    """
    if not (servers and sync) or package == "systemd-timesyncd" or (package == "chrony" and readers):
        return []
    why = f"{package} synchronizes the clock here, and this role cannot set its servers"
    if package == "chrony":
        why = "chrony synchronizes the clock here, and its configuration does not read /etc/chrony/sources.d"
        why += " (sourcedir, since chrony 4.0)"
    way = (
        "set the servers in its own configuration and leave base_ntp_servers empty, or remove the package:"
        f" apt-get purge {package}"
    )
    return [f"base_ntp_servers: {why}; {way}"]


class FilterModule:
    """Filters of the role base."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "certificate_faults": certificate_faults,
            "certificate_paths": certificate_paths,
            "clock": clock,
            "clock_faults": clock_faults,
            "hugepages_wanted": hugepages_wanted,
        }
