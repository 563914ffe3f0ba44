"""What programs preload: everything but TCMalloc, and in training runs TCMalloc where it was asked."""

from __future__ import annotations

import os
from collections.abc import Callable

from testinfra.host import Host

Ssh = Callable[..., "object"]

GSUTIL = "/usr/local/bin/gsutil-like"


def output(ssh: Ssh, command: str) -> str:
    done = ssh(command, user=os.environ["TPU_OPS_USER"])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_session_keeps_the_other_entries_and_loses_tcmalloc(ssh: Ssh) -> None:
    assert output(ssh, "printenv LD_PRELOAD BESIDE_ENVIRONMENT").splitlines() == ["libm.so.6", "kept"]
    login = output(ssh, "env -u LD_PRELOAD bash -lc 'echo ${LD_PRELOAD-unset} $BESIDE_PROFILE'")
    assert login == "unset kept"


def test_nothing_else_in_the_files_is_lost(host: Host) -> None:
    assert host.file("/etc/environment.d/50-tpu.conf").content_string == "BESIDE_ENVIRONMENT_D=kept\n"
    assert host.file("/etc/security/pam_env.conf").content_string == "LD_PRELOAD_BESIDE DEFAULT=kept\n"
    assert host.file("/etc/ld.so.preload").content_string.strip() == ""
    host.check_output("cmp /etc/profile /usr/share/base-files/profile")
    assert "/etc/bash.bashrc" not in host.run("dpkg --verify bash").stdout


def test_a_program_that_tcmalloc_breaks_runs_in_a_session(ssh: Ssh) -> None:
    assert output(ssh, GSUTIL) == "runs"
    for kind in "li":
        assert output(ssh, f"bash -{kind}c {GSUTIL}") == "runs"


def test_training_runs_have_a_file_that_brings_it_back_for_them(ssh: Ssh) -> None:
    script = "set -a; . /etc/tpu_ops/tcmalloc.env; exec grep -c /libtcmalloc /proc/self/maps"
    assert int(output(ssh, f"env -u LD_PRELOAD sh -c '{script}'")) > 0
    assert output(ssh, "readlink /usr/local/lib/tpu_ops/libtcmalloc.so") == "/usr/local/lib/libtcmalloc.so.4"
