"""The real gcloud on the lab's buckets, with the variables that `tpu_ops lab env` sets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lab_api import LabApi
from tpu_ops.lab.environment import variables
from tpu_ops.lab.instance import Endpoints, Instance

pytestmark = pytest.mark.gcloud


@pytest.fixture
def gcloud(shared_api: LabApi, tmp_path: Path) -> Callable[..., str]:
    """Run `gcloud storage` and return what it wrote."""
    lab = Instance("gs", tmp_path / "lab")
    given = variables(lab, Endpoints(shared_api.grpc, shared_api.rest), None, tmp_path / "ansible.cfg")

    def run(*words: str) -> str:
        command = ["gcloud", "storage", *words]
        return subprocess.run(
            command, env=os.environ | given, check=True, timeout=120, stdout=subprocess.PIPE, text=True
        ).stdout

    return run


@pytest.mark.parametrize("size", [0, 1000, 10 << 20], ids=["empty", "one request", "resumable"])
def test_a_file_goes_there_and_back(gcloud: Callable[..., str], tmp_path: Path, size: int) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    there.write_bytes((b"line\r\n--" * size)[:size])
    bucket = f"gs://gcloud{size}"
    gcloud("buckets", "create", bucket, "--location=us-central2")
    gcloud("cp", str(there), f"{bucket}/a/b")
    assert gcloud("ls", "-r", bucket).split() == [f"{bucket}/:", f"{bucket}/a/:", f"{bucket}/a/b"]
    gcloud("cp", f"{bucket}/a/b", str(back))
    assert back.read_bytes() == there.read_bytes()
    gcloud("rm", f"{bucket}/a/b")
    assert gcloud("ls", bucket) == ""
