"""The files of a fleet that ssh reads: ssh_config, known_hosts and the configuration for a jump host."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

from tpu_ops import files
from tpu_ops.errors import OpsError
from tpu_ops.files import unwritable
from tpu_ops.ssh import known_hosts
from tpu_ops.ssh.known_hosts import Keys

#: Maximum size of a fleet's file that is read, in bytes.
LARGEST = 256 * 1024 * 1024


class FleetFiles:
    """Paths and texts of the files of one fleet.

    Args:
        directory: The state directory of the fleet.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def ssh_config(self, login: str = "") -> Path:
        """Path of the OpenSSH configuration with one host per worker; a login set in a shell has its own file."""
        return self.directory / (f"ssh_config-{login}" if login else "ssh_config")

    @property
    def jump_config(self) -> Path:
        """Path of the OpenSSH configuration for a jump host that is not a worker of the fleet."""
        return self.directory / "jump_config"

    @property
    def known_hosts(self) -> Path:
        """Path of the file with host keys, under each worker's alias."""
        return self.directory / "known_hosts"

    def host_keys(self) -> tuple[dict[str, Keys], set[str]]:
        """Return the known host keys by alias, and the aliases whose keys were trusted on first contact only."""
        text = self.text(self.known_hosts)
        return known_hosts.parse(text), known_hosts.trusted_first(text)

    def write_host_keys(self, keys: Mapping[str, Keys], trusted_first: Container[str]) -> None:
        """Replace the content of known_hosts."""
        replace(self.known_hosts, known_hosts.text_of(keys, trusted_first), 0o644)

    def text(self, path: Path) -> str:
        """Return a file's text; empty if the file does not exist.

        Raises:
            OpsError: The file cannot be read, or is not a regular file.
        """
        try:
            return files.read_regular(path, LARGEST).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as exc:
            fixes = {
                NotADirectoryError: "set TPU_OPS_STATE to a directory",
                PermissionError: "make the file readable, or set TPU_OPS_STATE to another directory",
            }
            fix = fixes.get(type(exc), "move the file away: tpu_ops will create it again")
            raise OpsError(f"cannot read the fleet's state: {exc.strerror}", where=str(path), fix=fix) from exc


def replace(path: Path, text: str, mode: int) -> None:
    """Replace a file's text atomically.

    Raises:
        OpsError: The file cannot be written.
    """
    try:
        files.replace(path, text, mode)
    except OSError as exc:
        raise unwritable(path, exc) from exc
