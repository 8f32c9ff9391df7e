"""Makes modules unimportable in programs, in the ranks that they start, and in forks of them."""

import importlib.abc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SITECUSTOMIZE = """\
import sys
sys.path.append({tests!r})
from support.blocked import block
block({names!r}, {log!r})
"""


def block_in_programs(names: Sequence[str], directory: Path) -> dict[str, str]:
    """Return variables for programs, in which these modules, and all that is in these packages, cannot be imported.

    The file `tried` in `directory`, which this creates, lists those that a program has tried to import.
    """
    directory.mkdir()
    tests = str(Path(__file__).parents[1])
    text = SITECUSTOMIZE.format(tests=tests, names=[*names], log=str(directory / "tried"))
    (directory / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(directory)}


def block(names: Sequence[str], log: str) -> None:
    """Make the modules unimportable in this process. A fork of a command server imports samestep anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "samestep"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(names, log))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: Sequence[str], log: str) -> None:
        self.names, self.log = names, log

    def find_spec(self, fullname: str, *_: Any) -> None:
        if any(f"{fullname}.".startswith(f"{name}.") for name in self.names):
            with open(self.log, "a") as file:
                file.write(f"{fullname}\n")
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
