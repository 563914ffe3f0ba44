"""Programs that are hard to end, as arguments of `python -c`."""

from __future__ import annotations

#: Ignores SIGTERM and holds the file that it is called with, by a thread: its first one has ended.
HEADLESS = """
# HEADLESS
import ctypes, signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
chip = open(sys.argv[1])
threading.Thread(target=time.sleep, args=(600,)).start()
print("settled", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
