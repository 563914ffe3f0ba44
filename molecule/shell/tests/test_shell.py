"""What somebody finds who logs in: programs that run, a prompt that names the worker, and own settings that win."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable

import pytest
from testinfra.host import Host

Ssh = Callable[..., subprocess.CompletedProcess[str]]


def as_sid(host: Host, command: str) -> str:
    """Run a command as somebody with files of his own, and return what it prints."""
    with host.sudo():
        return host.check_output(f"cd /home/sid && sudo -H -u sid env -u ZDOTDIR {command}")


@pytest.mark.parametrize("program", ["byobu --version", "mosh --version", "nvim --version", "tmux -V", "zsh --version"])
def test_programs_run(host: Host, program: str) -> None:
    assert host.check_output(program)


def test_tmux_starts_with_the_workers_name_in_its_status_line(host: Host) -> None:
    shown = host.check_output(
        "tmux -L proof new -d && tmux -L proof show -gv status-left && tmux -L proof show -gv history-limit"
        " && tmux -L proof show -gv mouse; tmux -L proof kill-server"
    )
    assert shown.splitlines() == [f"[{host.backend.host}] #S ", "50000", "on"]


def test_mosh_server_starts_for_whoever_logs_in(ssh: Ssh) -> None:
    done = ssh("mosh-server new -p 60001:60010; pkill -u $(id -u) mosh-server", os.environ["TPU_OPS_USER"])
    assert "MOSH CONNECT 600" in done.stdout, done.stderr


def test_zsh_shows_the_workers_name_and_asks_new_people_nothing(host: Host) -> None:
    shown = host.check_output("zsh -i -c 'print -P $PROMPT; print $HISTSIZE' 2>&1")
    assert f"@{host.backend.host} " in shown
    assert "newuser" not in shown
    assert shown.endswith("50000")
    assert host.check_output("zsh -c 'whence -f zsh-newuser-install'")


def test_oh_my_zsh_is_loaded_at_the_pinned_commit_and_cannot_be_changed(host: Host) -> None:
    assert host.check_output("zsh -i -c 'print $OMZ_LOADED'") == ":git:one"
    assert host.run("touch /opt/oh-my-zsh/oh-my-zsh.sh").rc != 0


def test_settings_that_others_added_to_the_configuration_are_kept(host: Host) -> None:
    assert host.check_output("zsh -i -c 'print $BESIDE $BESIDE_ENV'") == "kept kept"
    assert host.check_output("tmux -L own new -d && tmux -L own show -gv @beside; tmux -L own kill-server") == "kept"


def test_own_settings_win_and_own_files_are_as_they_were(host: Host) -> None:
    script = "zsh -i -c " + shlex.quote("print -P $PROMPT; print $HISTSIZE")
    assert as_sid(host, script).splitlines() == ["mine> ", "7"]
    tmux = "tmux -L sid new -d && tmux -L sid show -gv history-limit; tmux -L sid kill-server"
    assert as_sid(host, f"sh -c {shlex.quote(tmux)}") == "7"
    assert as_sid(host, "cat .zshrc .tmux.conf") == "PROMPT='mine> '\nHISTSIZE=7\nset -g history-limit 7"
