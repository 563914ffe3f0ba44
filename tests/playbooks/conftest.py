"""A lab for all tests of playbooks on workers, with a fleet directory of its own and a bare pod of two workers.

test_converging.py comes first and configures the pod; each test finds it as the one before it left it.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator

import pytest

from tests.support.desk import Desk, lab_up
from tests.support.fleet import ROOT

#: A variable of the fleet whose value only the controller's environment has.
VARIABLES = """
facts_own_variables: [own_secret]
own_secret: "{{ lookup('ansible.builtin.env', 'OWN_SECRET') }}"
"""


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab is up; the lab is taken down at the end in any case."""
    fleet = tmp_path_factory.mktemp("fleet")
    shutil.copytree(ROOT / "inventory", fleet / "inventory")
    (fleet / "inventory/group_vars/all/own.yml").write_text(VARIABLES)
    secret = secrets.token_hex(16)
    with lab_up("plays", tmp_path_factory.mktemp("plays"), TPU_OPS_FLEET=str(fleet), OWN_SECRET=secret) as shell:
        shell.do("tpu_ops", "create", "pod", "--type", "v4-16", "--zone", "us-central2-b")
        yield shell
