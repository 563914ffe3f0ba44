"""Filters of the role base; no effects, so that their tests are tables."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import Any

#: Generations before v5e. JAX asks for transparent hugepages on v5e and newer (jax/_src/cloud_tpu_init.py, JAX 0.10.2).
EARLIER = ("v2-", "v3-", "v4-")

#: Units that keep the clock, by the name of their package; chrony is what Google's images bring.
CLOCKS = {
    "chrony": "chrony.service",
    "ntpsec": "ntpsec.service",
    "ntp": "ntp.service",
    "openntpd": "openntpd.service",
    "systemd-timesyncd": "systemd-timesyncd.service",
}

#: What the module ca_certificates takes from a file.
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
#: Where apt, pip and uv can fetch from.
ADDRESS = re.compile(r"[a-z][a-z0-9+]*:/\S*")


def certificate_paths(names: list[str], directory: str) -> list[str]:
    """Given base_ca_certificates, return the files on this machine; relative ones are below a directory."""
    return [str(Path(directory, Path(name).expanduser())) for name in names]


def certificate_faults(paths: list[str]) -> list[str]:
    """Given what `certificate_paths` returned, return the files in which OpenSSL finds no certificates."""
    return [
        f"base_ca_certificates[{position}]: {path} on this machine: {fault}; name a file in PEM form"
        for position, path in enumerate(paths)
        if (fault := _certificate_fault(Path(path)))
    ]


def _certificate_fault(path: Path) -> str:
    try:
        certificates = PEM.findall(path.read_bytes())
    except OSError as exc:
        return str(exc.strerror)
    if not certificates:
        return "it holds no certificate"
    try:
        text = b"\n".join(certificates).decode("ascii", "replace")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        return "a certificate in it is damaged"
    return ""


def address_faults(index: str, mirrors: dict[str, Any]) -> list[str]:
    """Given base_pip_index_url and base_apt_mirrors, return what pip, uv and apt could not fetch from."""
    named = {"base_pip_index_url": index} if index else {}
    named |= {f"base_apt_mirrors: {old}": new for old, new in mirrors.items()}
    faults = [
        f"{name}: is not an address such as https://mirror.example.org/path"  # It may hold a password.
        for name, value in named.items()
        if not ADDRESS.fullmatch(str(value))
    ]
    return faults + [
        f"base_apt_mirrors: '{old}' is not the beginning of an address in apt's sources"
        for old in mirrors
        if not ADDRESS.fullmatch(str(old))
    ]


def hugepages_wanted(setting: str, accelerator_type: str) -> str:
    """Return what transparent hugepages are to be on a worker of this accelerator type; empty leaves them alone."""
    if setting != "auto":
        return "" if setting == "keep" else setting
    return "always" if accelerator_type and not accelerator_type.startswith(EARLIER) else ""


def clock(units: dict[str, dict[str, str]]) -> dict[str, str]:
    """Given the units that are there, return package and unit of what keeps the clock, or is to keep it."""
    package = next((package for package, unit in CLOCKS.items() if unit in units), "systemd-timesyncd")
    return {"package": package, "unit": CLOCKS[package]}


class FilterModule:
    """Filters of the role base."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "address_faults": address_faults,
            "certificate_faults": certificate_faults,
            "certificate_paths": certificate_paths,
            "clock": clock,
            "hugepages_wanted": hugepages_wanted,
        }
