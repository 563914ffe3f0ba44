"""Image build: add the certificates of a bundle that the distribution does not have to the local store.

Runs inside the image with its system Python (3.8 or newer), standard library only. Usage: ca.py BUNDLE DIRECTORY
"""

from __future__ import annotations

import re
import ssl
import sys
from pathlib import Path

PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
DISTRIBUTION = Path("/usr/share/ca-certificates")


def certificates(text: str) -> dict[bytes, str]:
    """Return the certificates in a PEM text by their binary form."""
    return {ssl.PEM_cert_to_DER_cert(pem.strip()): pem.strip() for pem in PEM.findall(text)}


def missing(bundle: str, known: list[str]) -> list[str]:
    """Return the certificates of a bundle that are in none of the known PEM texts."""
    there: set[bytes] = set()
    for text in known:
        there.update(certificates(text))
    return [pem for der, pem in certificates(bundle).items() if der not in there]


def main(bundle: str, directory: str) -> None:
    """Write one file for each new certificate of the bundle."""
    known = [path.read_text(errors="ignore") for path in DISTRIBUTION.rglob("*.crt")]
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    for number, pem in enumerate(missing(Path(bundle).read_text(errors="ignore"), known)):
        (target / f"tpu-lab-controller-{number:03}.crt").write_text(pem + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
