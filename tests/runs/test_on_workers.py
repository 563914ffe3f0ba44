"""Runs on two real workers: what they leave, what they say, who may do what. Absence is read past tpu_ops."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import BOTH, SIZE
from tests.support.folded import lines_of
from tests.support.runs import Bench
from tpu_ops.protocol.wire import PROTOCOL

pytestmark = pytest.mark.lab

HASHES = """
import hashlib, json, os, sys
digest = lambda data: hashlib.sha256(data).hexdigest()
env = {name: digest(os.environb[name.encode()]) for name in ("PLAIN", "ODD", "EMPTY", "LARGE")}
print(json.dumps({"argv": [digest(os.fsencode(word)) for word in sys.argv[1:]], "env": env}))
"""


def test_a_command_runs_on_every_worker_as_the_person(bench: Bench) -> None:
    script = 'set -e; id -un; pwd; echo "$TPU_OPS_RANK of $TPU_OPS_WORLD_SIZE"; '
    # The output is hers to open by its name.
    script += "echo one >/dev/stderr; echo two | tee /dev/stdout"
    done = bench.tpu_ops("train", "pod", "--rank", "all", "--shell", "--", script)
    assert done.returncode == 0, done.stderr
    for rank in BOTH:
        assert lines_of(done.stdout, rank) == ["ada", "/home/ada", f"{rank} of {SIZE}", "one", "two", "two"]
    bench.clean()


def test_words_and_variables_arrive_byte_by_byte(bench: Bench) -> None:
    """Worker 0's login shell is bash, worker 1's is zsh, and both print from their rc files."""
    odd = [
        b"$HOME",
        b"${HOME} `id` $(id)",
        b"%n %% $$",
        b"a 'b' \"c\" \\d",
        b"two\nlines\n",
        b"",
        b"\xff\xfe bytes",
        b" ",
        b"*",
        b"x" * 100_000,
    ]
    words = [os.fsdecode(word) for word in odd]
    env = ["--env", "PLAIN=1", "--env", "ODD=" + os.fsdecode(b"${A}%n\n'\"\xff"), "--env", "EMPTY="]
    env += ["--env", "LARGE=" + "y" * 100_000]
    done = bench.tpu_ops("train", "pod", "--rank", "all", *env, "--", "python", "-c", HASHES, *words)
    assert done.returncode == 0, done.stderr

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    expected = {
        "argv": [digest(word) for word in odd],
        "env": {
            "PLAIN": digest(b"1"),
            "ODD": digest(b"${A}%n\n'\"\xff"),
            "EMPTY": digest(b""),
            "LARGE": digest(b"y" * 100_000),
        },
    }
    assert [[json.loads(line) for line in lines_of(done.stdout, rank)] for rank in BOTH] == [[expected]] * SIZE


def test_run_gathers_equal_output_and_keeps_words_and_codes(bench: Bench) -> None:
    done = bench.tpu_ops(
        "run", "pod", "--json", "--", "sh", "-c", 'printf "%s|" "$@"; exit 255', "sh", "$HOME", "a b", "", "'"
    )
    rows = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(row["host"], row["code"], row["stdout"], row["stderr"]) for row in rows] == [
        (f"pod-w{index}", 255, "$HOME|a b||'|", "") for index in BOTH
    ]
    done = bench.tpu_ops("run", "pod", "--", "echo", "same")
    assert done.stdout == "--- pod-w[0-1] (2 workers)\nsame\n"


def test_run_prints_the_output_of_one_worker_byte_by_byte(bench: Bench) -> None:
    script = "import os; data = bytes(range(256)) * 20; os.write(1, data); os.write(2, data)"
    argv = ["run", "pod-w0", "--", "python3", "-c", script]
    done = subprocess.run(bench.command(*argv), env=bench.environ(), capture_output=True, timeout=90, check=False)
    whole = bytes(range(256)) * 20
    assert (done.returncode, done.stdout == whole, done.stderr == whole) == (0, True, True)


def test_a_line_is_shown_before_the_program_has_finished_it(bench: Bench) -> None:
    script = 'printf .; for i in $(seq 200); do [ ! -e "$TPU_OPS_RUN_DIR/seen" ] || exec echo done; sleep 0.1; done'
    process = bench.popen("train", "pod", "--name", "dots", "--shell", "--", f"{script}; exit 1")
    assert process.stdout is not None
    assert process.stdout.read(5) == "[0] ."
    for index in BOTH:
        bench.inside(index, "touch /var/lib/tpu_ops/runs/dots/files/seen")
    rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest.splitlines()[0]) == (0, "done"), said


def test_run_names_the_worker_that_takes_too_long_and_leaves_nothing_there(bench: Bench) -> None:
    done = bench.tpu_ops(
        "run", "pod", "--timeout", "4", "--", "sh", "-c", "case $(hostname) in *-0) ;; *) sleep 60;; esac"
    )
    assert done.returncode == 1
    assert "pod-w1: did not end within 4 s" in done.stdout
    bench.await_(lambda: bench.left(1) == [], "the command on the worker to be ended")


def test_a_second_start_is_refused_and_told_by_whom(bench: Bench) -> None:
    bench.started("sleep", "600", name="first")
    try:
        refused = bench.tpu_ops("train", "pod", "--", "true", person="bob")
        assert refused.returncode == 1
        assert "first" in refused.stderr
        assert "ada" in refused.stderr
        # Past preflight, the workers themselves refuse: the request is what a controller would send.
        spec = json.loads(bench.inside(0, "cat /var/lib/tpu_ops/runs/first/record.json"))
        assert spec["person"]["name"] == "ada"
        answer = ask(bench, "bob", "start", spec=bare_spec("second"))
        assert answer["error"]["kind"] == "held"
        assert answer["error"]["holder"]["run_id"] == "first"
        denied = bench.tpu_ops("stop", "first", "--force", person="bob")
        assert denied.returncode == 1
        assert "ada" in denied.stdout + denied.stderr
        bench.await_state(0, "first", "running")
    finally:
        bench.tpu_ops("stop", "first")
    bench.clean()


def bare_spec(run_id: str, **changes: object) -> dict[str, object]:
    """Return a spec as a controller sends it."""
    spec: dict[str, object] = {
        "run_id": run_id,
        "attempt": 1,
        "rank": 0,
        "world_size": 1,
        "node": "pod",
        "slice": 0,
        "slices": 1,
        "worker": "pod-w0",
        "workers": ["pod-w0"],
        "argv": ["true"],
        "env": {},
        "secrets": {},
        "user": "",
        "cwd": "",
        "venv": "",
        "grace_failure": 1,
        "grace_stop": 1,
        "barrier": 10,
        "lease": 15,
        "exit_skew": 60,
        "net": None,
        "chips": 0,
        "force": False,
        "code_digest": "",
        "started_from": "test",
    }
    return spec | changes


def ask(bench: Bench, person: str, action: str, index: int = 0, **values: object) -> Any:
    """Send a request to a worker's host program by hand, as a person, and return its answer."""
    bench.tpu_ops("run", f"pod-w{index}", "--", "true", person=person)
    line = json.dumps({"marker": "0123456789abcdef", "protocol": PROTOCOL, "action": action, **values}) + "\n"
    done = subprocess.run(
        ["ssh", "-F", str(bench.ssh_config(person)), f"pod-w{index}", "sudo -n /usr/local/sbin/tpu-host"],
        input=line,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return json.loads(done.stdout.partition("\n0123456789abcdef\n")[2])


def test_the_sudo_rule_gives_no_more_than_a_request_as_oneself(bench: Bench) -> None:
    def run_as_bob(*argv: str) -> subprocess.CompletedProcess[str]:
        return bench.tpu_ops("run", "pod-w0", "--", *argv, person="bob")

    assert run_as_bob("sudo", "-n", "/usr/local/sbin/tpu-host", "supervise", "x").returncode == 1
    assert run_as_bob("sudo", "-n", "PYTHONPATH=/home/bob", "/usr/local/sbin/tpu-host").returncode == 1
    assert run_as_bob("sudo", "-n", "id").returncode == 1
    answer = ask(bench, "bob", "start", spec=bare_spec("as-root", uid=0))
    assert answer["error"]["kind"] == "invalid"
    spoof = bare_spec("spoof", argv=["id", "-un"])
    request = {"marker": "0123456789", "protocol": PROTOCOL, "action": "start", "spec": spoof}
    pipe = "env SUDO_UID=0 PYTHONPATH=/tmp sudo -n /usr/local/sbin/tpu-host"
    spoofed = run_as_bob("sh", "-c", f"echo '{json.dumps(request)}' | {pipe}")
    assert '"ok": true' in spoofed.stdout
    bench.await_(lambda: bench.record(0, "spoof")["state"] == "succeeded", "the run to end")
    assert bench.inside(0, "cat /var/lib/tpu_ops/runs/spoof/log/*.log") == "bob\n"


def test_a_link_leads_nobody_where_she_may_not_go_herself(bench: Bench) -> None:
    """Root takes these paths: an environment, a directory, libtpu's lockfile, and the files of another's secrets."""
    packages = "hidden/lib/python3.11/site-packages/jax-9.9.9.dist-info"
    hidden = f"cd /home/ada; mkdir -p hidden/bin {packages}; touch hidden/bin/python precious"
    bench.inside(0, f"{hidden}; chown -R ada: hidden precious; chmod 700 hidden; chmod 600 precious")
    links = {"/home/bob/env": "/home/ada/hidden", "/tmp/libtpu_lockfile": "/home/ada/precious"}
    bench.inside(0, "".join(f"ln -s {place} {link}; chown -h bob: {link}; " for link, place in links.items()))
    refused = bench.tpu_ops("train", "pod", "--venv", "/home/bob/env", "--", "true", person="bob")
    assert "no environment at /home/bob/env" in refused.stderr
    assert "9.9.9" not in refused.stdout + refused.stderr
    answer = ask(bench, "bob", "start", spec=bare_spec("astray", cwd="env"))
    assert answer["error"]["message"].startswith("working directory /home/bob/env: Permission denied; `namei -l ")
    bench.await_clean(0)
    secret = ("--secret", f"KEY={bench.folder / 'key.pub'}")
    bench.started("sh", "-c", "cat $KEY_FILE; exec sleep 600", name="private", options=secret)
    bench.await_log(0, "private", "ssh-ed25519")
    steal = "ln -s /run/tpu-run-secrets/KEY ~/key; cat ~/key; ls /run/tpu-run-secrets"
    stolen = json.loads(bench.tpu_ops("run", "pod-w0", "--json", "--", "sh", "-c", steal, person="bob").stdout)[0]
    assert (stolen["stdout"], stolen["stderr"].count("Permission denied")) == ("", 2)
    assert bench.tpu_ops("stop", "private").returncode == 0
    assert bench.inside(0, "ls /tmp/libtpu_lockfile /home/ada/precious 2>/dev/null || true") == "/home/ada/precious\n"
    bench.inside(0, "rm -r /home/ada/hidden /home/ada/precious /home/bob/env /home/bob/key")
    bench.clean()


def test_a_command_that_is_not_there_starts_nowhere(bench: Bench) -> None:
    done = bench.tpu_ops("train", "pod", "--name", "absent", "--", "no-such-program", "--flag")
    assert done.returncode == 1
    assert "no-such-program is not on PATH" in done.stderr
    assert bench.record(0, "absent")["state"] == "refused"
    assert "no such file" in bench.inside(1, "ls /var/lib/tpu_ops/runs/absent 2>&1", check=False).lower()
    assert bench.tpu_ops("status", "absent").returncode == 1
    bench.clean()


def test_a_record_that_became_a_fifo_is_named_and_no_process_waits_for_it(bench: Bench) -> None:
    bench.started("true", name="fifo")
    bench.await_state(0, "fifo", "succeeded")
    record = "/var/lib/tpu_ops/runs/fifo/record.json"
    bench.inside(0, f"rm {record} && mkfifo {record}")
    try:
        for person in ("ada", "bob"):
            done = bench.tpu_ops("status", "fifo", person=person)
            assert f"{record} is damaged: it is not a regular file; `sudo mv " in done.stdout, done.stderr
            assert "pod-w0" in done.stdout
            assert "knows nothing" not in done.stdout
            listed = bench.tpu_ops("runs", person=person)
            assert f"pod-w0: {record} is damaged" in listed.stderr
        assert bench.inside(0, "ps -eo args --no-headers | grep -c '[t]pu-host' || true").strip() == "0"
    finally:
        bench.inside(0, "rm -r /var/lib/tpu_ops/runs/fifo")


def test_much_output_arrives_whole_over_several_segments(bench: Bench) -> None:
    script = "import sys; sys.stdout.write(''.join('%d %s\\n' % (i, 'x' * 60) for i in range(150000)))"
    done = bench.tpu_ops("train", "pod", "--name", "chatty", "--", "python", "-c", script)
    assert done.returncode == 0, done.stderr
    assert [int(line.split()[1]) for line in done.stdout.splitlines()] == list(range(150000))
    assert bench.inside(0, "ls /var/lib/tpu_ops/runs/chatty/log/*.log | wc -l").strip() == "2"
    again = bench.tpu_ops("train", "pod", "--name", "chatty", "--dry-run", "--", "true")
    assert (again.returncode, "run chatty has been on this worker before" in again.stderr) == (1, True), again.stderr
    assert "choose another --name" in again.stderr


def test_sync_brings_the_tree_and_removes_only_its_own(bench: Bench, tmp_path: Path) -> None:
    source = tmp_path / "code"
    (source / "pkg").mkdir(parents=True)
    (source / "train.py").write_text("import pkg.part; print('synced', pkg.part.VALUE)")
    (source / "pkg" / "part.py").write_text("VALUE = 1")
    (source / "old.py").write_text("")
    (source / ".gitignore").write_text("*.ckpt\nsecret/\n")
    (source / "secret").mkdir()
    (source / "secret" / "key").write_text("hidden")
    train = ("train", "pod", "--sync", str(source), "--rank", "1", "--", "python", "train.py")
    noisy = bench.tpu_ops(*train)
    assert (noisy.returncode, "login shell there prints text" in noisy.stderr) == (1, True)
    assert "[1] synced 1" in bench.tpu_ops(*train, person="bob").stdout
    for index in BOTH:
        assert "secret" not in bench.inside(index, "ls -A /home/bob/tpu_ops/code")
        bench.inside(index, "touch /home/bob/tpu_ops/code/weights.ckpt /home/bob/tpu_ops/code/notes.txt")
    (source / "old.py").unlink()
    (source / "pkg" / "part.py").write_text("VALUE = 2")
    done = bench.tpu_ops(*train, person="bob")
    assert "[1] synced 2" in done.stdout
    assert re.search(r"digest [0-9a-f]{12}", done.stderr)
    for index in BOTH:
        names = bench.inside(index, "ls /home/bob/tpu_ops/code").split()
        assert sorted(names) == ["notes.txt", "pkg", "train.py", "weights.ckpt"]
        assert bench.inside(index, "stat -c %U /home/bob/tpu_ops/code/train.py").strip() == "bob"
    (source / "notes.txt").write_text("of the desk")
    refused = bench.tpu_ops("sync", "pod", str(source), person="bob")
    assert (refused.returncode, "notes.txt in ~/tpu_ops/code differs from yours" in refused.stderr) == (1, True)
    assert bench.inside(0, "cat /home/bob/tpu_ops/code/notes.txt") == ""


def test_preflight_names_each_worker_and_what_is_wrong_with_it(bench: Bench) -> None:
    bench.inside(0, "mv /usr/local/sbin/tpu-host /root/away")
    holder = "exec 3</dev/accel1; exec sleep 300"
    bench.inside(1, f"setsid sh -c '{holder}' >/dev/null 2>&1 </dev/null & echo $! >/root/holder")
    try:
        bench.await_(
            lambda: "accel1" in bench.inside(1, "ls -l /proc/[0-9]*/fd 2>/dev/null | grep accel || true"), "a holder"
        )
        done = bench.tpu_ops("train", "pod", "--", "true")
        assert done.returncode == 1
        assert re.search(r"pod-w0 .*launcher is not installed.*tpu_ops configure pod-w0", done.stdout)
        assert re.search(r"pod-w1 .*chips are held by pid \d+ of root: sleep 300", done.stdout)
    finally:
        bench.inside(0, "mv /root/away /usr/local/sbin/tpu-host")
        bench.inside(1, "kill $(cat /root/holder) $(pgrep -x -f 'sleep 300')", check=False)


def test_secrets_of_the_environment_stay_out_of_sight(bench: Bench, tmp_path: Path) -> None:
    secret = "s3cr3t-value-of-the-test"
    (tmp_path / "env").write_text(f"# comment\nWANDB_API_KEY={secret}\n")
    done = bench.tpu_ops(
        *("train", "pod", "--env-file", str(tmp_path / "env"), "--detach", "--name", "quiet", "--"),
        *("sh", "-c", 'printf "${#WANDB_API_KEY}\\n"; unset WANDB_API_KEY; exec sleep 600'),
    )
    assert done.returncode == 0, done.stderr
    try:
        where = "systemctl show tpu-run.service; journalctl --no-pager; cat /proc/[0-9]*/cmdline; "
        where += "cat /var/lib/tpu_ops/runs/quiet/record.json; grep -r s3cr3t /run/tpu_ops /run/systemd || true"
        assert secret not in bench.inside(0, f"({where}) 2>/dev/null | tr '\\0' ' '")
        bench.await_log(0, "quiet", f"{len(secret)}\n")
        assert f"{len(secret)}\n" == bench.inside(0, "cat /var/lib/tpu_ops/runs/quiet/log/*.log")
    finally:
        bench.tpu_ops("stop", "quiet")
