"""The console's functions."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Popen, run

from samestep.console import describe_ranks, format_bytes, format_time

INTERRUPTED = """
import signal
from samestep.console import print_error
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
print_error("x" * 5_000_000)
signal.setitimer(signal.ITIMER_REAL, 0)
"""

BLOCKS = """
import sys
from samestep.console import saying_when_slow
with saying_when_slow("starting 3 ranks", 60):
    pass
with saying_when_slow("starting 2 ranks", 0.01):
    sys.stdin.read()
"""


def test_a_long_text_on_an_unbuffered_stderr_is_printed_despite_signals() -> None:
    done = run([sys.executable, "-u", "-c", INTERRUPTED], stderr=subprocess.PIPE, text=True, check=True)
    assert len(done.stderr) == 5_000_001


def test_a_standard_error_that_cannot_be_written_ends_nothing() -> None:
    code = "from samestep.console import print_error, say; say('a'); print_error('b'); print('goes on')"
    with open("/dev/full", "wb") as full:
        done = run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, check=True)
    assert done.stdout == "goes on\n"


@pytest.mark.parametrize(
    "words",
    [["-m", "samestep", "inspect", "nowhere"], ["-c", "import samestep; samestep.Run('run', batch_size=0)"]],
)
def test_the_exit_code_of_an_error_that_cannot_be_printed(words: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        assert run([sys.executable, *words], cwd=tmp_path, stderr=full).returncode == 2


def test_only_a_slow_block_is_announced() -> None:
    with Popen([sys.executable, "-c", BLOCKS], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "samestep: starting 2 ranks\n"
        process.stdin.close()
        assert process.stderr.read() == ""


def test_formats() -> None:
    assert describe_ranks(range(100)) == "100 ranks (0, 1, 2, 3, 4, 5 ...)"
    sizes = (0, 999, 1000, 12.34e6, 512e6, 1.5e9, 3e13)
    assert [*map(format_bytes, sizes)] == ["0 B", "999 B", "1 KB", "12 MB", "512 MB", "1.5 GB", "30 TB"]
    durations = (0, 2.1e-5, 0.0034, 1.25, 300, 720, 7200, 86400 * 3)
    assert [*map(format_time, durations)] == ["0 s", "21 us", "3.4 ms", "1.2 s", "300 s", "12 min", "2 h", "3 days"]
