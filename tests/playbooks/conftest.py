"""A lab with a configured pod of two workers and a bare node with a blank disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.desk import Desk, Lab, lab_up


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A shell whose lab is up; taken down at the end whatever happened."""
    with lab_up("plays", tmp_path_factory.mktemp("plays")) as shell:
        shell.do("tpu_ops", "create", "pod", "--type", "v4-16", "--zone", "us-central2-b")
        shell.do("ansible-playbook", "site.yml", "--tags", "base,python,jax,launcher", timeout=1800)
        shell.do("tpu_ops", "create", "solo", "--type", "v4-8", "--zone", "us-central2-b")
        Lab(shell).attach_disk("solo")
        yield shell
