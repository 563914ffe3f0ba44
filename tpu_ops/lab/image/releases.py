"""Which release of which distribution a runtime version stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """A release of a distribution.

    Attributes:
        distribution: As in the ID of os-release: ``debian``.
        version: For people and image registries: ``13``.
        codename: For archives of packages: ``trixie``.
    """

    distribution: str
    version: str
    codename: str

    @property
    def reference(self) -> str:
        """The release's own image in the registry."""
        return f"docker.io/library/{self.distribution}:{self.version}"

    def __str__(self) -> str:
        return f"{self.distribution.capitalize()} {self.version}"


FOCAL = Release("ubuntu", "20.04", "focal")
JAMMY = Release("ubuntu", "22.04", "jammy")
#: Runtime versions that only the lab has: workers of exactly this release, or an error.
EXACT = {
    "lab-debian12": Release("debian", "12", "bookworm"),
    "lab-debian13": Release("debian", "13", "trixie"),
    "lab-ubuntu2004": FOCAL,
    "lab-ubuntu2204": JAMMY,
    "lab-ubuntu2404": Release("ubuntu", "24.04", "noble"),
}


def of_runtime(runtime_version: str) -> Release:
    """Return the release of a runtime version; of Google's own, the older tpu-vm-* are Ubuntu 20.04, the rest 22.04."""
    if found := EXACT.get(runtime_version):
        return found
    return FOCAL if runtime_version.startswith("tpu-vm-") else JAMMY
