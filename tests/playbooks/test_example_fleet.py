"""The fleet that users copy: every role has something to do."""

from __future__ import annotations

import pytest
import yaml

from tests.support.fleet import ROOT

GROUP_VARS = ROOT / "examples" / "fleet" / "inventory" / "group_vars"
#: Roles that a user says something to; facts reads for all others, and launcher takes its variables from jax.
ROLES = sorted({path.name for path in (ROOT / "roles").iterdir()} - {"facts", "launcher"})


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_something_to_do(role):
    files = sorted(GROUP_VARS.rglob("*.yml"))
    said = [
        value for path in files for name, value in yaml.safe_load(path.read_text()).items() if name.startswith(role)
    ]
    assert any(value not in ([], {}, "", False) for value in said)
