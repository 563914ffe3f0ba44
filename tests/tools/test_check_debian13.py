"""tools/check_debian13.py: what the container of the tests on Python 3.13 is given."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tools import check_debian13
from tpu_ops.errors import OpsError


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        ("PIP_INDEX_URL", True),
        ("PIP_EXTRA_INDEX_URL", True),
        ("UV_DEFAULT_INDEX", True),
        ("UV_INDEX", True),
        ("https_proxy", True),
        ("NO_PROXY", True),
        ("PIP_FIND_LINKS", False),
        ("UV_CACHE_DIR", False),
        ("SSL_CERT_FILE", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", False),
    ],
)
def test_the_container_gets_the_package_index_and_no_other_variable(name: str, passed: bool) -> None:
    assert check_debian13.index_settings({name: "value"}) == ([f"{name}=value"] if passed else [])


def test_the_container_cannot_write_to_the_clone(tmp_path: Path) -> None:
    arguments = check_debian13.arguments("image", tmp_path / "settings")
    mounts = [value for option, value in pairwise(arguments) if option == "--volume"]
    assert [mount for mount in mounts if str(check_debian13.ROOT) in mount] == [f"{check_debian13.ROOT}:/clone:ro"]


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("no image registry answers for debian:13, and this machine's own archive has no Debian 13", 0, "left out: no"),
        ("mmdebstrap is missing", 1, "error: mmdebstrap is missing"),
    ],
)
def test_only_a_machine_without_debian_13_may_leave_the_tests_out(
    answer: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_debian13.without_image(OpsError(answer)) == code
    assert capsys.readouterr().err.startswith(f"debian13: {said}")
