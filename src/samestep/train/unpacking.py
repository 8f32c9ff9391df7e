"""A loop of a plain script, `for x, y in loader`, over what is no loader."""

import dis
from types import FrameType

from samestep.errors import Error


def refuse_unpacking(frame: FrameType, what: str, instead: str) -> None:
    """Raises Error where the line that `frame` is at assigns to several names, as in `for x, y in epoch`."""
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("UNPACK"):
        raise Error(
            f"{what} was unpacked like a batch: loop over it first, `{instead}`; the loops are run.epochs() (or "
            "run.steps()), `for step in epoch`, and `for x, y in step`"
        )
