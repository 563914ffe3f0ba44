"""Stands for a program with jax.profiler's server, and for the module that records its profile. Standard library only.

`python profiler.py PORT [silent]` listens as the server of gRPC does, and says `ready`.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

#: A module jax.collect_profile that writes what it was asked for into a file where the real one writes a profile.
COLLECT = """
import os, sys
words = sys.argv[1:]
place = os.path.join(words[words.index("--log_dir") + 1], "plugins", "profile", "2026_01_01_00_00_00")
os.makedirs(place)
with open(os.path.join(place, "127.0.0.1_{}.xplane.pb".format(words[0])), "w") as file:
    file.write(" ".join(words[:2]) + " " + os.environ["JAX_PLATFORMS"])
open(os.path.join(place, "remote.trace.json.gz"), "w").close()
"""
#: The module of an environment without xprof.
LACKING = 'raise ImportError("This script requires `xprof` to be installed.")'


def install(folder: Path, module: str = COLLECT) -> None:
    """Write a package `jax` into a directory for PYTHONPATH."""
    (folder / "jax").mkdir(parents=True)
    (folder / "jax" / "__init__.py").touch()
    (folder / "jax" / "collect_profile.py").write_text(module)


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def answer(path_known: bool) -> bytes:
    """Return what gRPC's server answers to a method that the profiler does not implement, or to an unknown one."""
    trailers = b"\x88@\x0ccontent-type\x10application/grpc@\x0bgrpc-status\x0212"
    trailers += b"\x00\x0cgrpc-message\x0eunimplemented." if path_known else b""
    return frame(4, 0, 0, b"\x00\x04\x00@\x00\x00") + frame(4, 1, 0) + frame(1, 5, 1, trailers)


def serve(port: int, *, silent: bool) -> None:
    """Answer callers for ever."""
    with socket.create_server(("0.0.0.0", port)) as server:  # noqa: S104 - as the real one
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            link, _ = server.accept()
            data = link.recv(4096)
            if not silent:
                link.sendall(answer(b"/tensorflow.ProfilerService/Monitor" in data))
                link.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), silent=sys.argv[2:] == ["silent"])
