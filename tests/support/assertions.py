"""Rewrites the assert statements of test modules, as pytest does, once for all workers.

Otherwise each worker of pytest-xdist would rewrite all modules at the same time, for 5 s of CPU, and again in each run
if PYTHONDONTWRITEBYTECODE is set.
"""

from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite


def write_rewritten(config: pytest.Config, directory: Path) -> None:
    """Write pytest's own files of bytecode for the test modules below `directory`, where they are missing or stale."""
    tools: Any = rewrite  # internals of pytest; without one of them, each worker does it for itself
    try:
        for path in [*directory.rglob("conftest.py"), *directory.rglob("test_*.py")]:
            written = tools.get_cache_dir(path) / f"{path.stem}{tools.PYC_TAIL}"
            if tools._read_pyc(path, written) is None and tools.try_makedirs(written.parent):
                source, code = tools._rewrite_test(path, config)
                tools._write_pyc(config.stash[rewrite.assertstate_key], code, source, written)
    except (AttributeError, TypeError, KeyError):
        return
