"""The fleet of examples/fleet in a lab: what its shell needs besides, and the playbook that makes what it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLEET = ROOT / "examples" / "fleet" / "inventory" / "tpu_vm.yml"
#: The variables that are different in the lab.
LAB = ROOT / "molecule" / "site" / "lab" / "hosts.yml"
#: Makes the node `store` and what else the example names. Run it when the other nodes are there.
PREPARE = "molecule/site/prepare.yml"
#: Deletes that node.
CLEANUP = "molecule/site/cleanup.yml"


def environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return the variables by which a lab's shell takes examples/fleet for its fleet.

    Args:
        environ: That shell's, as `tpu_ops lab env` sets it.
        directory: For the keys and archives that `PREPARE` makes.
    """
    _, _, lab = environ["ANSIBLE_INVENTORY"].partition(",")
    return {
        "ANSIBLE_INVENTORY": f"{FLEET},{lab},{LAB}",
        # Where the scenarios' playbooks look for them.
        "MOLECULE_EPHEMERAL_DIRECTORY": str(directory),
        "WANDB_API_KEY": "void-wandb",
    }
