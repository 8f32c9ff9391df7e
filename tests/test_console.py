"""What the console's functions print arrives."""

import subprocess
import sys

from support.commands import run

INTERRUPTED = """
import signal
from samestep.console import print_error
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
print_error("x" * 5_000_000)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_long_text_on_an_unbuffered_stderr_is_printed_despite_signals() -> None:
    done = run([sys.executable, "-u", "-c", INTERRUPTED], stderr=subprocess.PIPE, text=True, check=True)
    assert len(done.stderr) == 5_000_001
