"""`python -m samestep.tools.traced SCRIPT`: runs a script as `python SCRIPT`, after the hook of a tool.

The ranks of samestep's own launcher call the hook themselves. A tool puts this module before the script for others.
"""

import json
import sys
from importlib import import_module

from samestep.launch.rank_process import load_main
from samestep.world.environment import HOOK, child_variables


def run_traced(words: list[str]) -> None:
    """Call the hook in the environment, then run SCRIPT or -m MODULE with its arguments."""
    hook, options = json.loads(child_variables()[HOOK])  # noqa: TID251 a variable of the environment
    import_module(hook).begin(options)
    kind, words = ("module", words[1:]) if words[0] == "-m" else ("script", words)
    code, main = load_main(kind, words[0], words[1:])
    exec(code, main.__dict__)


if __name__ == "__main__":
    run_traced(sys.argv[1:])
