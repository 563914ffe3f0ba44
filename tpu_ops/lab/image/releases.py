"""The release of a distribution for each runtime version."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """A release of a distribution.

    Attributes:
        distribution: The ID in os-release, for example ``debian``.
        version: The version for users and image registries, for example ``13``.
        codename: The code name for package archives, for example ``trixie``.
    """

    distribution: str
    version: str
    codename: str

    @property
    def reference(self) -> str:
        """The release's image in the registry."""
        return f"docker.io/library/{self.distribution}:{self.version}"

    def __str__(self) -> str:
        return f"{self.distribution.capitalize()} {self.version}"


FOCAL = Release("ubuntu", "20.04", "focal")
JAMMY = Release("ubuntu", "22.04", "jammy")
#: Runtime versions of the lab only: workers of exactly this release.
EXACT = {
    "lab-debian12": Release("debian", "12", "bookworm"),
    "lab-debian13": Release("debian", "13", "trixie"),
    "lab-ubuntu2004": FOCAL,
    "lab-ubuntu2204": JAMMY,
    "lab-ubuntu2404": Release("ubuntu", "24.04", "noble"),
}


def of_runtime(runtime_version: str) -> Release:
    """Return the release of a runtime version. Of Google's, tpu-vm-* are Ubuntu 20.04, all others 22.04."""
    if found := EXACT.get(runtime_version):
        return found
    return FOCAL if runtime_version.startswith("tpu-vm-") else JAMMY
