"""Ansible's inventory of a fleet, in this process."""

from __future__ import annotations

from typing import Any

from tests.support.fleet import FleetDir

#: A label's value that would be run if it were taken for a template.
HOSTILE = "{{ lookup('pipe','id') }}"


def inventory(fleet: FleetDir, *, cache: bool = True, source: str | list[str] = "") -> Any:
    """Return the inventory manager of the fleet's file or other sources; `cache=False` is what --flush-cache does."""
    # Ansible reads its configuration when it is imported: tests/inventory/conftest.py says which first.
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader

    return InventoryManager(loader=DataLoader(), sources=source or str(fleet.file), cache=cache)


def hosts(found: Any) -> list[str]:
    """Return the names of an inventory's hosts."""
    return sorted(found.hosts)


def variables(found: Any, host: str) -> dict[str, Any]:
    """Return the variables of a host."""
    values: dict[str, Any] = found.get_host(host).get_vars()
    return values
