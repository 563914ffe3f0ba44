"""The releases that the scenarios may leave out."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Script = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).resolve().parents[2]

#: What the lab says where it has no image for a release.
NO_IMAGE = "no image registry answers for {0}, and this machine's own archive has no {0}"
#: Stands for the lab, which has images of all releases but one.
LAB = """#!/bin/sh
if [ "$1 $2" = "lab env" ]; then echo "export ANSIBLE_INVENTORY=a,b"; fi
if [ "$1 $2" = "create molecule-{release}" ]; then echo "{said}" >&2; exit 1; fi
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Return a function that runs the script with programs that stand for the lab and for Molecule."""
    for name in ("tools/molecule.sh", "docs/unproved.md"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "molecule" / "base").mkdir(parents=True)
    (tmp_path / "molecule" / "base" / "molecule.yml").touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)

    def call(
        *arguments: str, lab: str, molecule: str = "echo scenarios ran", only: str = ""
    ) -> subprocess.CompletedProcess[str]:
        (programs / "tpu_ops").write_text(lab)
        (programs / "molecule").write_text(f"#!/bin/sh\n{molecule}\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        return subprocess.run(
            [str(tmp_path / "tools" / "molecule.sh"), *arguments],
            env={"PATH": "/usr/bin:/bin", "MOLECULE_RELEASE": only},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return call


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
    script: Script, release: str, said: str, only: str, answer: str | None
) -> None:
    done = script("converge", lab=LAB.format(release=release, said=said.format(release)), only=only)
    left_out = answer is not None and answer.startswith("left out")
    assert (done.returncode, "scenarios ran" in done.stdout) == ((0, True) if left_out else (1, False)), done.stderr
    assert (answer or said.format(release)) in (done.stdout if left_out else done.stderr)


def test_a_misspelt_scenario_is_named_before_the_lab_is_asked_for_anything(script: Script) -> None:
    done = script("test", "-s", "base", "-s", "bse", lab="#!/bin/sh\necho the lab was asked >&2\n")
    assert (done.returncode, done.stderr) == (1, "there is no scenario bse; there are: base\n")


def test_the_output_of_a_failed_molecule_is_shown(script: Script) -> None:
    done = script("test", lab=LAB.format(release="none", said=""), molecule="echo no room; exit 1")
    assert done.returncode == 1
    assert "no room\nscenario base failed; all it printed: .build/molecule/molecule/base.log\n" in done.stdout


def test_nothing_is_left_of_a_lab_that_was_killed_when_another_begins(script: Script, tmp_path: Path) -> None:
    lab = """#!/bin/sh
here=$(dirname "$0")
echo "$1 $2" >>"$here/asked"
case "$1 $2" in
"lab up") touch "$here/up" ;;
"lab env") [ -e "$here/up" ] && echo "export ANSIBLE_INVENTORY=a,b" ;;
esac
"""
    stale = tmp_path / ".build/molecule/molecule/base/state.yml"
    stale.parent.mkdir(parents=True)
    stale.touch()
    script("converge", "-s", "base", lab=lab)
    asked = (tmp_path / ".venv/bin/asked").read_text().splitlines()
    assert asked[:4] == ["lab env", "lab down", "lab up", "lab env"]
    assert not stale.exists()
    stale.parent.mkdir(parents=True)
    stale.touch()
    script("converge", "-s", "base", lab=lab)
    assert stale.exists()


@pytest.mark.parametrize("command", ["test", "converge"])
def test_the_state_of_a_scenario_belongs_to_the_clone_and_its_lab(script: Script, tmp_path: Path, command: str) -> None:
    done = script(
        command,
        "-s",
        "base",
        lab=LAB.format(release="none", said=""),
        molecule='echo "$MOLECULE_EPHEMERAL_DIRECTORY" "$@"',
    )
    place, *arguments = done.stdout.splitlines()[0].split()
    assert place == str(tmp_path / ".build/molecule/molecule/base")
    assert "-sbase" in "".join(arguments)
