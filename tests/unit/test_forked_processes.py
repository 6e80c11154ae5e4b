"""Signals in processes that a run forks, such as the workers of a reward function's pool."""

from __future__ import annotations

import subprocess
import sys

FORKED = """
import os, signal, time
from engine.launch import signals

signals.DEAF = 0.3
signals.stop_on_sigterm(is_rank=True)
for wait in (0.0, 0.002):
    for _ in range(100):
        child = os.fork()
        while not child:
            time.sleep(1)
        time.sleep(wait)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
child = os.fork()
if not child:
    os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
assert os.waitpid(child, 0)[1] == 0
time.sleep(signals.DEAF + 0.5)  # a child's signal is not taken for one of this process
assert not signals.stop_requested() and not signal.pthread_sigmask(signal.SIG_BLOCK, ())
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
except KeyboardInterrupt as stopped:
    assert "SIGTERM" in stopped.args
    print("stopped as before")
"""


def test_a_forked_process_ends_by_a_signal_as_any_other() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout == "stopped as before\n", (ended.returncode, ended.stderr)
