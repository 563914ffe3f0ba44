"""The messages for failures of a playbook."""

from __future__ import annotations

from typing import Any

import pytest

from tpu_ops.ansible.playbook import Step, changes_of, message_of, note_of

INSTALL = """'/usr/bin/apt-get -y -o "Dpkg::Options::=--force-confdef" install 'zsh=5.9' 'less'' failed: """
INTERRUPTED = "E: dpkg was interrupted, you must manually run 'sudo dpkg --configure -a' to correct the problem."
SUB = "E: Sub-process /usr/bin/dpkg returned an error code (1)"
HELD = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (apt-get)"
LATER = "another process is installing packages on the worker; try again later, or raise base_apt_lock_timeout"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"msg": "no"}, "no"),
        ({"msg": "non-zero return code", "stderr": "x: not found"}, "x: not found"),
        (
            {"msg": f"{INSTALL}W: slow\n{INTERRUPTED} \n"},
            f"apt-get: {INTERRUPTED} (run `sudo dpkg --configure -a` on the worker first)",
        ),
        (
            {
                "msg": f"{INSTALL}{SUB}\n",
                "stdout": "Setting up\ndpkg: error processing package zsh (--configure):\n x\n",
            },
            f"apt-get: dpkg: error processing package zsh (--configure): x; {SUB}",
        ),
        ({"msg": f"{INSTALL}\nE: a\nE: b\nE: c\nE: d\n"}, "apt-get: E: b; E: c; E: d"),
        ({"msg": f"{INSTALL}Killed\n"}, "apt-get: Killed"),
        ({"msg": f"{INSTALL}{HELD}\n"}, f"apt-get: {HELD} ({LATER})"),
        (
            {"msg": "Failed to lock apt for exclusive operation: x"},
            f"Failed to lock apt for exclusive operation: x ({LATER})",
        ),
        ({"results": [{"failed": True, "msg": f"{INSTALL}E: a"}, {"failed": False}]}, "apt-get: E: a"),
        ({"censored": "the output has been hidden"}, "the output has been hidden"),
    ],
)
def test_a_failure_is_told_in_the_words_that_tell_it(result: dict[str, Any], said: str) -> None:
    assert message_of(result) == said


@pytest.mark.parametrize(
    ("result", "stdout", "outcome"),
    [
        ({"changed": True}, "changed: [a]", "changed"),
        ({"changed": False}, "ok: [a]", "ok"),
        ({"censored": "hidden"}, "changed: [a]", "changed"),
        ({"censored": "hidden"}, "changed: [a -> b]", "changed"),
        # With the task's name before the first host of it (display_skipped_hosts).
        ({"censored": "hidden"}, "\r\nTASK [x : changed: [a]] ****\r\nchanged: [a]", "changed"),
        ({"censored": "hidden"}, "\r\nTASK [x : changed: [a]] ****\r\nok: [a]", "ok"),
        ({"censored": "hidden"}, "ok: [a]", "ok"),
        ({"censored": "hidden"}, "", "ok"),
    ],
)
def test_a_task_that_hides_its_result_has_changed_what_ansible_says_it_has(
    result: dict[str, Any], stdout: str, outcome: str
) -> None:
    event = {"event": "runner_on_ok", "stdout": stdout, "event_data": {"host": "a", "task": "x", "res": result}}
    note = note_of(event)
    assert isinstance(note, Step)
    assert note.outcome == outcome


@pytest.mark.parametrize(
    ("action", "event", "result", "lines"),
    [
        ("ansible.builtin.debug", "runner_on_ok", {"msg": "one\ntwo"}, ("one", "two")),
        ("debug", "runner_on_ok", {"msg": ["one", "two"], "changed": True}, ("one", "two")),
        ("ansible.builtin.assert", "runner_on_ok", {"msg": ["pod: 16 chips"]}, ("pod: 16 chips",)),
        ("ansible.builtin.assert", "runner_on_ok", {"msg": "All assertions passed"}, ()),
        ("ansible.builtin.assert", "runner_on_failed", {"msg": "no"}, ()),
        ("ansible.builtin.debug", "runner_on_ok", {"censored": "hidden"}, ()),
        ("ansible.builtin.copy", "runner_on_ok", {"msg": "copied"}, ()),
    ],
)
def test_messages_of_debug_and_assert_tasks_are_reported(
    action: str, event: str, result: dict[str, Any], lines: tuple[str, ...]
) -> None:
    found = note_of({"event": event, "event_data": {"task_action": action, "host": "a", "res": result}})
    assert isinstance(found, Step)
    assert found.report == lines


def test_changes_of_packages_leave_out_what_apt_says_beside_them() -> None:
    said = """The following packages were automatically installed and are no longer required:
  libslang2 pastebinit
  python3-newt
Use 'apt autoremove' to remove them.
Suggested packages:
  lm-sensors
The following NEW packages will be installed:
  htop
0 upgraded, 1 newly installed, 0 to remove and 4 not upgraded.
"""
    assert changes_of({"diff": {"prepared": said}}) == [
        "The following NEW packages will be installed:",
        "  htop",
        "0 upgraded, 1 newly installed, 0 to remove and 4 not upgraded.",
    ]


FILE = {
    "before_header": "/etc/x 0:0 0644",
    "after_header": "/etc/x 0:0 0600",
    "before": "one\nsame\n",
    "after": "two\nsame\n",
}


@pytest.mark.parametrize(
    ("result", "brief", "whole"),
    [
        ({"diff": [FILE]}, ["/etc/x 0:0 0600"], ["/etc/x 0:0 0600", "@@ -1,2 +1,2 @@", "-one", "+two", " same"]),
        ({"diff": {"before": "jax==1\n", "after": "jax==2\n"}}, ["- jax==1", "+ jax==2"], ["- jax==1", "+ jax==2"]),
        ({"results": [{"changed": True, "invocation": {"module_args": {"name": "ada"}}}]}, ["ada"], ["ada"]),
        ({"invocation": {"module_args": {"name": ["a", "b"]}}}, ["a", "b"], ["a", "b"]),
        ({"invocation": {"module_args": {"argv": ["true"]}}}, [], []),
    ],
)
def test_changes_name_packages_people_and_files_and_whole_ones_have_the_lines_of_files(
    result: dict[str, Any], brief: list[str], whole: list[str]
) -> None:
    assert (changes_of(result), changes_of(result, whole=True)) == (brief, whole)
