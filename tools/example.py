"""The fleet of examples/fleet in a lab: additional environment variables, and playbooks for its prerequisites."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLEET = ROOT / "examples" / "fleet" / "inventory" / "tpu_vm.yml"
#: Inventory with the variables that differ in the lab.
LAB = ROOT / "molecule" / "site" / "lab" / "hosts.yml"
#: Creates the node `store` and other prerequisites of the example. Run it after the other nodes were created.
PREPARE = "molecule/site/prepare.yml"
#: Deletes the node `store`.
CLEANUP = "molecule/site/cleanup.yml"


def environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return the environment variables with which a lab's shell uses examples/fleet.

    Args:
        environ: The environment of the shell, as `tpu_ops lab env` sets it.
        directory: The directory for the keys and archives that `PREPARE` creates.
    """
    _, _, lab = environ["ANSIBLE_INVENTORY"].partition(",")
    return {
        "ANSIBLE_INVENTORY": f"{FLEET},{lab},{LAB}",
        # The playbooks of the Molecule scenarios, which `PREPARE` runs, create their files in this directory.
        "MOLECULE_EPHEMERAL_DIRECTORY": str(directory),
        "WANDB_API_KEY": "void-wandb",
    }
