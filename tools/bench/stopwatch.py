"""Runs one command and prints what it took.

That is: wall s, user s, system s, peak kB, exit code, start (s since 1970), s that the machine's processors were busy.

    python -I -S stopwatch.py STDOUT STDERR COMMAND...

A process of its own, because Linux counts the memory of whoever starts a program to that program's peak: the one
that starts it has to be smaller than the smallest that is measured. CPU and peak include the command's children.
"""

import os
import sys
import time


def busy() -> float:
    """Return the seconds that all processors of this machine have been busy, together; NaN where it does not say."""
    try:
        # Not by pathlib: this process has to be small.
        with open("/proc/stat") as file:  # noqa: PTH123
            user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    except OSError:
        return float("nan")
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the command that the arguments name, with its output in two files, which may be the same."""
    stdout, stderr, *command = sys.argv[1:]
    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    outputs = [(os.POSIX_SPAWN_OPEN, number, path, writing, 0o600) for number, path in ((1, stdout), (2, stderr))]
    outputs.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    before, began, start = busy(), time.time(), time.monotonic()
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=outputs)
    _, status, usage = os.wait4(pid, 0)
    wall = time.monotonic() - start
    code, machine = os.waitstatus_to_exitcode(status), busy() - before
    print(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss, code, began, machine)


if __name__ == "__main__":
    main()
