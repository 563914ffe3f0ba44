"""Runs one command and prints what it took: wall s, user s, system s, peak kB, exit code, start (s since 1970).

    python -I -S stopwatch.py STDOUT STDERR COMMAND...

A process of its own, because Linux counts the memory of whoever starts a program to that program's peak: the one
that starts it has to be smaller than the smallest that is measured. CPU and peak include the command's children.
"""

import os
import sys
import time


def main() -> None:
    """Run the command that the arguments name, with its output in two files, which may be the same."""
    stdout, stderr, *command = sys.argv[1:]
    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    outputs = [(os.POSIX_SPAWN_OPEN, number, path, writing, 0o600) for number, path in ((1, stdout), (2, stderr))]
    outputs.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    began, start = time.time(), time.monotonic()
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=outputs)
    _, status, usage = os.wait4(pid, 0)
    wall = time.monotonic() - start
    print(wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss, os.waitstatus_to_exitcode(status), began)


if __name__ == "__main__":
    main()
