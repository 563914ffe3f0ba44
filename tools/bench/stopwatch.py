"""Run one command and print its measured resources.

It prints wall s, user s, system s, peak kB, exit code, start (s since 1970), and s that the processors were busy.

    python -I -S stopwatch.py STDOUT STDERR COMMAND...

This is a separate process because Linux counts the memory of the parent to the peak of a started program. So the parent
has to be smaller than any measured program. CPU and peak include the command's children.
"""

import os
import sys
import time


def busy() -> float:
    """Return the seconds for which this machine's processors have been busy, in total; NaN if unknown."""
    try:
        # pathlib would make this process larger.
        with open("/proc/stat") as file:  # noqa: PTH123
            user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    except OSError:
        return float("nan")
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the command in the arguments, with its output in two files (or one file) named before it."""
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
