"""Filter that holds a host's variables against the roles' argument_specs; no effects, so that its tests are tables."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.errors import UnsupportedError

Options = dict[str, dict[str, Any]]


def variable_faults(specifications: list[Options], values: dict[str, Any]) -> list[str]:
    """Given the options of all roles and a host's variables, return every fault of type, choice or unknown key."""
    options = {name: option for specification in specifications for name, option in specification.items()}
    found = {name: _plain(values[name]) for name in options if name in values}
    result = ArgumentSpecValidator(options).validate(found, validate_role_argument_spec=True)
    return [
        f"unknown key {error.msg}" if isinstance(error, UnsupportedError) else str(error.msg)
        for error in result.errors.errors
    ]


def _plain(value: Any) -> Any:
    """Return a value in Python's own containers.

    Ansible's hold on to all variables of the host, and the validator copies deeply: a third of a second, twice a host.
    """
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


class FilterModule:
    """Filters of the playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {"variable_faults": variable_faults}
