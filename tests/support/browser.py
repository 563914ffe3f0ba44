"""A real browser without a screen, for pages in files."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

#: What Chromium is called on different systems.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: For a test that needs it. tools/setup.sh installs it where the system has a package of it.
needs_browser = pytest.mark.skipif(not any(map(shutil.which, _NAMES)), reason="no Chromium is installed")


class Browser:
    """Opens pages from file://, with a profile of its own and without any way to a network.

    Args:
        folder: A directory for its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _call(self, page: Path, *options: str) -> str:
        program = next(filter(None, map(shutil.which, _NAMES)))
        command = [
            program,
            "--headless",
            # Root and users without namespaces have no sandbox.
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--proxy-server=127.0.0.1:9",
            f"--user-data-dir={self._folder / 'profile'}",
            *options,
            page.as_uri(),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def dom(self, page: Path) -> str:
        """Return the page as it is after it was loaded."""
        return self._call(page, "--dump-dom")

    def pdf(self, page: Path) -> bytes:
        """Return the page as it is printed."""
        target = self._folder / "page.pdf"
        self._call(page, f"--print-to-pdf={target}", "--no-pdf-header-footer")
        return target.read_bytes()

    def colours(self, page: Path, *, dark: bool = False, size: tuple[int, int] = (420, 900)) -> dict[str, int]:
        """Return how many pixels of a picture of the page have each colour, as in ``#ffffff``."""
        target = self._folder / "page.png"
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        self._call(page, f"--screenshot={target}", f"--window-size={size[0]},{size[1]}", scheme)
        return _colours(target.read_bytes())


def _colours(png: bytes) -> dict[str, int]:
    """Return the number of pixels of each colour in a PNG of 8 bits per channel, without interlacing."""
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", png[16:29])
    assert (depth, interlaced) == (8, 0)
    step = {2: 3, 6: 4}[kind]
    data, place = b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += 12 + length
    rows, before = zlib.decompress(data), bytearray(width * step)
    found: dict[str, int] = {}
    for row in range(height):
        begin = row * (width * step + 1)
        line = _unfiltered(rows[begin], bytearray(rows[begin + 1 : begin + 1 + width * step]), before, step)
        for at in range(0, len(line), step):
            colour = line[at : at + 3].hex()
            found[colour] = found.get(colour, 0) + 1
        before = line
    return {f"#{colour}": count for colour, count in found.items()}


def _unfiltered(kind: int, line: bytearray, above: bytearray, step: int) -> bytearray:
    """Return a row of a PNG without its filter (PNG specification, 9.2)."""
    for at in range(len(line)):
        left, up = line[at - step] if at >= step else 0, above[at]
        corner = above[at - step] if at >= step else 0
        if kind == 4:
            guess = left + up - corner
            near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))
            add = near[2]
        else:
            add = (0, left, up, (left + up) // 2)[kind]
        line[at] = (line[at] + add) & 0xFF
    return line
