"""Options of `tpu_ops train` that only real workers can prove. Absence is read past tpu_ops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs.conftest import BOTH
from tests.support.runs import Bench

pytestmark = pytest.mark.lab

VALUE = "hush-9e1f-of-the-test"
#: Finds the value, and not the command that looks for it.
PATTERN = VALUE.replace("9e1f", "9e1[f]")
#: Where a worker could keep a value: what is shown of units and processes, and all files that are not a process's own.
SHOWN = "systemctl show tpu-run.service; systemctl cat tpu-run.service; journalctl --no-pager; cat /proc/[0-9]*/cmdline"
FILES = f"grep -rla {PATTERN} /run /var/lib /var/log /etc /home /root /tmp /dev/shm"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret in the environment of the person's shell."""
    monkeypatch.setenv("API_KEY", VALUE)


@pytest.mark.parametrize("ending", ["stop", "kill"])
@pytest.mark.usefixtures("exported")
def test_a_secret_is_the_commands_alone_and_gone_with_the_run(bench: Bench, tmp_path: Path, ending: str) -> None:
    (tmp_path / "token").write_text(f"{VALUE}-2\n")
    script = 'stat -c "%a %U" $API_KEY_FILE; [ "$(cat $API_KEY_FILE)" = "$API_KEY" ] && echo same; echo ${#TOKEN}; '
    script += "ls $(dirname $TOKEN_FILE) 2>&1 | grep -c denied; exec sleep 600"
    name = f"hushed-{ending}"
    train = ("train", "pod", "--name", name, "--secret", "API_KEY", "--secret", f"TOKEN={tmp_path / 'token'}", "--json")
    said = ""
    for more in (["--dry-run"], ["--detach"]):
        done = bench.tpu_ops(*train, *more, "--shell", "--", *script.split(" "))
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    for index in BOTH:
        bench.await_log(index, name, "\n1\n")
        log = bench.inside(index, f"cat /var/lib/tpu_ops/runs/{name}/log/*.log")
        assert log.splitlines() == ["600 ada", "same", str(len(VALUE) + 2), "1"]
        assert VALUE not in bench.inside(index, f"({SHOWN}) 2>/dev/null | tr '\\0' ' '")
        held = bench.inside(index, f"{FILES} 2>/dev/null || true").splitlines()
        assert sorted(held) == ["/run/tpu-run-secrets/API_KEY", "/run/tpu-run-secrets/TOKEN"]
        assert bench.record(index, name)["secret_names"] == ["API_KEY", "TOKEN"]
    if ending == "stop":
        said += bench.tpu_ops("stop", name, "--json").stdout
    else:
        bench.inside(1, f"kill -KILL {bench.record(1, name)['supervisor']['pid']}")
    for index in BOTH:
        bench.await_clean(index)
        gone = f"{FILES} 2>/dev/null; ls -d /run/tpu-run-secrets 2>/dev/null; ({SHOWN}) 2>/dev/null | grep -a {PATTERN}"
        assert bench.inside(index, f"{gone} || true") == ""
    said += "".join(path.read_text() for path in bench.folder.glob("state-ada/**/*.json"))
    assert "API_KEY" in said
    assert VALUE not in said


def test_another_user_is_for_those_whom_sudo_lets_do_everything(bench: Bench) -> None:
    """What sudo asks a password for is not enough, nor a rule for some commands: a stolen login has no password."""
    train = ("train", "pod", "--user", "ada", "--detach", "--", "sh", "-c", "id -un; pwd; exec sleep 600")
    # Before the launcher's own rule, which the last match makes hold.
    path = "/etc/sudoers.d/aa-bob"

    def allow(rule: str) -> None:
        for index in BOTH:
            bench.inside(index, f"rm -f {path}; umask 0337; echo 'bob ALL=(ALL) {rule}' >{path}; visudo -cq")

    try:
        for rule in ("ALL", "NOPASSWD: /usr/bin/id"):
            allow(rule)
            denied = bench.tpu_ops("train", "--name", "denied", *train[1:], person="bob")
            assert denied.returncode == 1
            assert "bob is not allowed to run commands as ada" in denied.stderr
        allow("NOPASSWD: ALL")
        done = bench.tpu_ops("train", "--name", "lent", *train[1:], person="bob")
        assert done.returncode == 0, done.stderr
        for index in BOTH:
            bench.await_log(index, "lent", "/home/ada")
            assert bench.inside(index, "cat /var/lib/tpu_ops/runs/lent/log/*.log") == "ada\n/home/ada\n"
            assert bench.record(index, "lent")["person"]["name"] == "ada"
        shown = bench.tpu_ops("who", "pod", person="bob").stdout
        assert re.search(r"ada \(started by bob\) .* sh -c", shown), shown
        stopped = bench.tpu_ops("stop", "lent", person="bob")
        assert stopped.returncode == 0, stopped.stderr
        nobody = bench.tpu_ops("train", "pod", "--user", "carol", "--", "true", person="bob")
        assert "there is no user carol" in nobody.stderr
    finally:
        for index in BOTH:
            bench.inside(index, f"rm {path}")
    bench.clean()
