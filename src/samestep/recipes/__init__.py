"""Example scripts, to run and to copy."""

import argparse
import math
from collections.abc import Callable


def run_main(main: Callable[[], None]) -> None:
    """Run the main function of `python -m samestep.recipes.NAME`.

    An Error raised before the run exists also ends the program with its message and exit code 2.
    """
    from samestep.train.ending.shutdown import report_errors
    from samestep.world.environment import read_rank

    report_errors(read_rank())
    main()


def check_numbers(
    parser: argparse.ArgumentParser, args: argparse.Namespace, names: str, least: float, most: float = math.inf
) -> None:
    """End the program with a message if one of the options `names` is set, and not from `least` to `most`."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            span = f"{least:g} or more" if most == math.inf else f"a number from {least:g} to {most:g}"
            parser.error(f"--{name.replace('_', '-')} is {value}: give {span}")
