"""The files of a fleet that ssh reads: ssh_config, known_hosts and the configuration for a jump. Written atomically."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.files import unwritable
from tpu_ops.ssh import known_hosts
from tpu_ops.ssh.known_hosts import Keys

#: Bytes that one of the files may have.
LARGEST = 256 * 1024 * 1024


class FleetFiles:
    """Paths and texts of these files.

    Args:
        directory: Where what this machine knows of the fleet is kept.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def ssh_config(self, login: str = "") -> Path:
        """OpenSSH configuration, one host per worker; another one for each login that a shell has for itself."""
        return self.directory / (f"ssh_config-{login}" if login else "ssh_config")

    @property
    def jump_config(self) -> Path:
        """OpenSSH configuration for a jump that is no worker of the fleet."""
        return self.directory / "jump_config"

    @property
    def known_hosts(self) -> Path:
        """Host keys, under each worker's alias."""
        return self.directory / "known_hosts"

    def host_keys(self) -> tuple[dict[str, Keys], set[str]]:
        """Return the known host keys by alias, and the aliases whose keys only the first contact vouches for."""
        text = self.text(self.known_hosts)
        return known_hosts.parse(text), known_hosts.trusted_first(text)

    def write_host_keys(self, keys: Mapping[str, Keys], trusted_first: Container[str]) -> None:
        """Replace known_hosts."""
        replace(self.known_hosts, known_hosts.text_of(keys, trusted_first), 0o644)

    def text(self, path: Path) -> str:
        """Return a file's text; empty where there is none.

        Raises:
            OpsError: It cannot be read, or is no regular file.
        """
        try:
            return files.read_regular(path, LARGEST).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as exc:
            fixes = {
                NotADirectoryError: "set TPU_OPS_STATE to a directory",
                PermissionError: "make it readable, or set TPU_OPS_STATE to another directory",
            }
            fix = fixes.get(type(exc), "move it away: it will be recreated")
            raise OpsError(f"cannot read the fleet's state: {exc.strerror}", where=str(path), fix=fix) from exc


def replace(path: Path, text: str, mode: int) -> None:
    """Replace a file's text at once: a reader sees the old text or the new, never a part.

    Raises:
        OpsError: It cannot be written.
    """
    try:
        files.replace(path, text, mode)
    except OSError as exc:
        raise unwritable(path, exc) from exc
