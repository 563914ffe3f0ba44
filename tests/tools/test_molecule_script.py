"""Which releases the scenarios may go without."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: What the lab says where it has no image for a release.
NO_IMAGE = "no image registry answers for {0}, and this machine's own archive has no {0}"
#: Stands for the lab, which has images of all releases but one.
LAB = """#!/bin/sh
if [ "$1 $2" = "lab env" ]; then echo "export ANSIBLE_INVENTORY=a,b"; fi
if [ "$1 $2" = "create molecule-{release}" ]; then echo "{said}" >&2; exit 1; fi
"""


@pytest.mark.parametrize(
    ("release", "said", "only", "answer"),
    [
        ("ubuntu2204", NO_IMAGE, "", "left out: ubuntu2204: no image registry answers"),
        ("ubuntu2404", NO_IMAGE, "", "left out: ubuntu2404: no image registry answers"),
        ("ubuntu2404", NO_IMAGE, "ubuntu2404", None),
        ("ubuntu2404", "the disk is full", "", None),
        ("debian13", NO_IMAGE, "", "debian13 cannot be tested, and docs/unproved.md has no row for its workers"),
        ("debian12", NO_IMAGE, "", "debian12 cannot be tested, and docs/unproved.md has no row for its workers"),
    ],
)
def test_a_release_is_left_out_only_where_it_is_written_down(
    tmp_path: Path, release: str, said: str, only: str, answer: str | None
) -> None:
    for name in ("tools/molecule.sh", "docs/unproved.md"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "tpu_ops").write_text(LAB.format(release=release, said=said.format(release)))
    (programs / "molecule").write_text("#!/bin/sh\necho scenarios ran\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin", "MOLECULE_RELEASE": only}
    command = [str(tmp_path / "tools" / "molecule.sh"), "converge"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
    left_out = answer is not None and answer.startswith("left out")
    assert (done.returncode, "scenarios ran" in done.stdout) == ((0, True) if left_out else (1, False)), done.stderr
    assert (answer or said.format(release)) in (done.stdout if left_out else done.stderr)
