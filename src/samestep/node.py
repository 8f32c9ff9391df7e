"""`python -m samestep.node`: `samestep node` for engines that start a module on each machine, such as torchrun."""

import sys

from samestep.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "node")
    sys.exit(main())
