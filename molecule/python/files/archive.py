"""Makes an archive of packages that is laid out like the deadsnakes PPA, with the Python of the release before.

    archive.py DIRECTORY CODENAME

DIRECTORY/good and DIRECTORY/bad hold the same archive for workers of the release CODENAME, signed with two keys;
good.asc and bad.asc are these. The Python comes from this machine's own package source. What its packages need of the
older release is struck from them: nothing here uses it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from email.utils import formatdate
from pathlib import Path

from tpu_ops.lab.image import sources

#: This machine's distribution -> release of a worker -> an older release of this distribution and the version of its
#: Python, which is none that the worker has.
OLDER = {
    "debian": {
        "bookworm": ("bullseye", "3.9"),
        "jammy": ("bullseye", "3.9"),
        "trixie": ("bookworm", "3.11"),
        "noble": ("bookworm", "3.11"),
    },
    "ubuntu": {
        "bookworm": ("focal", "3.8"),
        "jammy": ("focal", "3.8"),
        "trixie": ("jammy", "3.10"),
        "noble": ("jammy", "3.10"),
    },
}


def run(*command: str | Path, cwd: Path | None = None, **environ: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(
        command, cwd=cwd, check=True, capture_output=True, text=True, timeout=300, env=os.environ | environ
    ).stdout


def download(scratch: Path, codename: str) -> tuple[str, list[Path]]:
    """Fetch the packages of the older Python; return its version and the files."""
    own = sources.read_os_release()
    older, version = OLDER[own["ID"]][codename]
    source = next(source for source in sources.read() if source.suite == own["VERSION_CODENAME"])
    signed = f"[signed-by={source.signed_by}]" if source.signed_by.startswith("/") else ""
    (scratch / "sources.list").write_text(f"deb {signed} {source.uri} {older} main\n")
    state, cache, pool = (scratch / name for name in ("state", "cache", "pool"))
    for folder in (state / "lists" / "partial", cache / "archives" / "partial", pool):
        folder.mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": cache,
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    run("apt-get", *options, "update")
    names = [
        f"libpython{version}-minimal",
        f"python{version}-minimal",
        f"libpython{version}-stdlib",
        f"python{version}",
    ]
    # Named for the version in the PPA; uv makes no environment without it where the Python still has that module.
    names.append("python3-distutils")
    run("apt-get", *options, "download", *names, cwd=pool)
    return version, sorted(pool.glob("*.deb"))


def repack(package: Path, target: Path, scratch: Path, version: str) -> None:
    """Rebuild a package so that it needs nothing but its own kind and the C library."""
    tree = scratch / "tree"
    run("dpkg-deb", "--raw-extract", package, tree)
    # Documents would conflict with those of the worker's own packages.
    shutil.rmtree(tree / "usr" / "share", ignore_errors=True)
    (tree / "DEBIAN" / "md5sums").unlink(missing_ok=True)
    control = tree / "DEBIAN" / "control"
    lines = []
    for field, _, value in (line.partition(": ") for line in control.read_text().splitlines()):
        if field in ("Depends", "Pre-Depends"):
            kept = [
                each for each in value.split(", ") if re.match(rf"(lib)?python{version}|libc6|zlib1g|libexpat1 ", each)
            ]
            lines.append(f"{field}: {', '.join(kept)}")
        elif field == "Package":
            lines.append(f"Package: {value.replace('python3-', f'python{version}-')}")
        elif field not in ("Recommends", "Suggests", "Breaks", "Conflicts", "Replaces", "Provides"):
            lines.append(f"{field}: {value}" if value else field)
    control.write_text("\n".join(lines) + "\n")
    run("dpkg-deb", "--root-owner-group", "-Zgzip", "--build", tree, target)
    shutil.rmtree(tree)


def companion(name: str, version: str, target: Path, scratch: Path, architecture: str) -> None:
    """Build a package with nothing in it, which stands for headers and the like."""
    tree = scratch / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: {architecture}\nMaintainer: nobody <nobody@localhost>\n"
        f"Depends: python{version}, python{version}-distutils\nDescription: stands for {name}\n"
    )
    run("dpkg-deb", "--root-owner-group", "-Zgzip", "--build", tree, target / f"{name}_1_{architecture}.deb")
    shutil.rmtree(tree)


def index(root: Path, codename: str, architecture: str) -> str:
    """Write the index of an archive's packages, and return the text of its Release file."""
    stanzas = []
    for package in sorted(root.glob("pool/**/*.deb")):
        data = package.read_bytes()
        more = {"Filename": package.relative_to(root), "Size": len(data), "SHA256": hashlib.sha256(data).hexdigest()}
        fields = run("dpkg-deb", "--field", package).rstrip("\n")
        stanzas.append(fields + "".join(f"\n{key}: {value}" for key, value in more.items()) + "\n")
    path = f"main/binary-{architecture}/Packages"
    listing = root / "dists" / codename / path
    listing.parent.mkdir(parents=True)
    listing.write_text("\n".join(stanzas))
    data = listing.read_bytes()
    return (
        f"Origin: LP-PPA-deadsnakes\nLabel: New Python Versions\nSuite: {codename}\nCodename: {codename}\n"
        f"Date: {formatdate(usegmt=True)}\nArchitectures: {architecture}\nComponents: main\n"
        f"SHA256:\n {hashlib.sha256(data).hexdigest()} {len(data)} {path}\n"
    )


def main(directory: Path, codename: str) -> None:
    """Make both archives."""
    architecture = run("dpkg", "--print-architecture").strip()
    directory.mkdir(parents=True)
    # Short enough for the socket of gpg's agent.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        scratch = Path(name)
        version, packages = download(scratch, codename)
        pool = directory / "good" / "pool" / "main" / "p" / f"python{version}"
        pool.mkdir(parents=True)
        for package in packages:
            repack(package, pool / package.name, scratch, version)
        for kind in ("dev", "venv"):
            companion(f"python{version}-{kind}", version, pool, scratch, architecture)
        release = index(directory / "good", codename, architecture)
        shutil.copytree(directory / "good", directory / "bad")
        for kind in ("good", "bad"):
            home = scratch / kind
            home.mkdir(mode=0o700)
            gpg = ("gpg", "--batch", "--homedir", home, "--passphrase", "", "--pinentry-mode", "loopback")
            run(*gpg, "--quick-generate-key", f"{kind} archive", "rsa2048", "sign", "never")
            (directory / f"{kind}.asc").write_text(run(*gpg, "--armor", "--export"))
            plain = home / "Release"
            plain.write_text(release)
            run(*gpg, "--clearsign", "--output", directory / kind / "dists" / codename / "InRelease", plain)
            listed = run(*gpg, "--with-colons", "--list-keys").splitlines()
            fingerprint = next(line.split(":")[9] for line in listed if line.startswith("fpr"))
            (directory / f"{kind}.fingerprint").write_text(fingerprint)
            run("gpgconf", "--homedir", home, "--kill", "all")
    (directory / "version").write_text(version)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
