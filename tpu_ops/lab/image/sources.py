"""This machine's apt sources of its own distribution.

Without an image registry, the base image is built from the mirror that this machine uses. Third-party repositories are
left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpu_ops.errors import UsageError
from tpu_ops.lab.image.releases import Release

_OPTION = re.compile(r"^\[(?P<options>[^\]]*)\]\s*")
_NETWORK_SCHEMES = ("http://", "https://", "ftp://")


@dataclass(frozen=True)
class Source:
    """One suite of an archive.

    Attributes:
        uri: The archive's address.
        suite: For example ``bookworm-updates``.
        components: For example ``("main",)``.
        signed_by: Path of the keyring, an inline key, or empty.
        trusted: Whether apt does not check signatures.
    """

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str = ""
    trusted: bool = False

    def line(self) -> str:
        """Return the source in the one-line format."""
        options = [f"signed-by={self.signed_by}"] if self.signed_by.startswith("/") else []
        options += ["trusted=yes"] if self.trusted else []
        shown = f"[{' '.join(options)}] " if options else ""
        return f"deb {shown}{self.uri} {self.suite} {' '.join(self.components)}"


def parse_one_line(text: str) -> list[Source]:
    """Return the binary package sources in a sources.list."""
    found = []
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip()
        if not line.startswith(("deb ", "deb\t")):
            continue
        rest = line[3:].strip()
        options: dict[str, str] = {}
        if match := _OPTION.match(rest):
            options = dict(word.split("=", 1) for word in match["options"].split() if "=" in word)
            rest = rest[match.end() :]
        words = rest.split()
        if len(words) >= 2:
            trusted = options.get("trusted", "no") == "yes"
            found.append(Source(words[0], words[1], tuple(words[2:]), options.get("signed-by", ""), trusted))
    return found


def parse_deb822(text: str) -> list[Source]:
    """Return the enabled binary package sources in a .sources file, one for each address and suite."""
    found = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in " \t" and key:
                fields[key] += "\n" + line.strip()
            elif ":" in line:
                key, value = line.split(":", 1)
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in {"no", "false"}:
            continue
        trusted = fields.get("trusted", "no").lower() == "yes"
        found += [
            Source(uri, suite, tuple(fields.get("components", "").split()), fields.get("signed-by", ""), trusted)
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        ]
    return found


def of_distribution(found: list[Source], os_release: Mapping[str, str]) -> list[Source]:
    """Select the sources of the distribution's own archive.

    Their suites have the release's code name and a main component, and are signed by the distribution's keyring. If a
    mirror signs with its own key, only the suites are checked.
    """
    name, codename = os_release.get("ID", ""), os_release.get("VERSION_CODENAME", "")
    suites = {codename, f"{codename}-updates", f"{codename}-security", f"{codename}/updates"}
    own = [source for source in found if source.suite in suites and "main" in source.components]
    signed = [
        source
        for source in own
        if not source.signed_by.startswith("/") or Path(source.signed_by).name.startswith(f"{name}-archive-")
    ]
    chosen = signed if any(source.suite == codename for source in signed) else own
    return list(dict.fromkeys(chosen))


def read_os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """Return the fields of an os-release file; empty if there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, value in pairs}


def read(apt: Path = Path("/etc/apt"), os_release: Mapping[str, str] | None = None) -> list[Source]:
    """Return the sources of this machine's distribution, in the order of its files.

    Raises:
        UsageError: The machine has none that a container can use.
    """
    release = read_os_release() if os_release is None else os_release
    found: list[Source] = []
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        if path.suffix not in {".list", ".sources"} or not path.is_file():
            continue
        parse = parse_deb822 if path.suffix == ".sources" else parse_one_line
        found += parse(path.read_text(errors="replace"))
    resolved = [_resolved(source) for source in of_distribution(found, release)]
    usable = [source for source in resolved if source.uri.startswith(_NETWORK_SCHEMES)]
    if not any(source.suite == release.get("VERSION_CODENAME") for source in usable):
        raise UsageError(
            "no image registry answers, and this machine has no apt source of its own distribution to build from",
            where=str(apt),
            fix="make an image registry reachable, or run the lab on Debian or Ubuntu with its archive in the sources",
        )
    return usable


def of_release(
    release: Release | None, apt: Path = Path("/etc/apt"), os_release: Mapping[str, str] | None = None
) -> tuple[str, list[Source]]:
    """Return a release's code name and its sources: this machine's sources with the suites of that release.

    The keyrings stay the same: each release of a distribution has the keys of neighbouring releases. apt refuses an
    archive whose key is missing.

    Args:
        release: The release; None means this machine's own.
        apt: The directory of apt's configuration.
        os_release: This machine's os-release fields; None reads the file.

    Raises:
        UsageError: The machine has no usable source, or another distribution.
    """
    own = read_os_release() if os_release is None else os_release
    if release and own.get("ID") != release.distribution:
        raise UsageError(
            f"no image registry answers for {release.reference}, and this machine's own archive has no {release}",
            where=f"{own.get('PRETTY_NAME') or own.get('ID') or 'an unknown distribution'}, {apt}",
            fix=f"make an image registry reachable, or run the lab on {release.distribution.capitalize()}",
        )
    found, codename = read(apt, own), own["VERSION_CODENAME"]
    if release is None or release.codename == codename:
        return codename, found
    return release.codename, [_moved(source, codename, release.codename) for source in found]


def _moved(source: Source, codename: str, other: str) -> Source:
    keyring = Path(source.signed_by)
    # Debian 12 has its keyring only under the older name, Debian 13 under both.
    if keyring.suffix == ".pgp" and keyring.with_suffix(".gpg").exists():
        keyring = keyring.with_suffix(".gpg")
    signed_by = str(keyring) if source.signed_by.startswith("/") else source.signed_by
    return replace(source, suite=source.suite.replace(codename, other, 1), signed_by=signed_by)


def _resolved(source: Source) -> Source:
    """Replace a file with a list of mirrors by its first mirror: the container does not have the file."""
    prefix = "mirror+file:"
    if not source.uri.startswith(prefix):
        return source
    path = Path("/" + source.uri.removeprefix(prefix).lstrip("/"))
    first = (
        next((line.split()[0] for line in path.read_text().splitlines() if line.strip()), "") if path.is_file() else ""
    )
    return Source(first, source.suite, source.components, source.signed_by, source.trusted)


def apt_settings(dump: str | None = None) -> list[str]:
    """Return this machine's apt settings for reaching the mirror: proxies, except those on loopback."""
    if dump is None:
        if not shutil.which("apt-config"):
            return []
        done = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, timeout=20, check=False)
        dump = done.stdout
    wanted = re.compile(r'^Acquire::https?::Proxy(::\S+)? "(?P<value>[^"]+)";$')
    return [
        line
        for line in dump.splitlines()
        if (match := wanted.match(line)) and not re.search(r"//(127\.|localhost|\[::1\])", match["value"])
    ]
