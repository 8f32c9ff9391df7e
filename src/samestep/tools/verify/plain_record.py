"""What is recorded about one rank of a script that does not use samestep."""

from collections import Counter
from pathlib import Path

import msgspec

from samestep.files import read_bytes


class Pass(msgspec.Struct):
    """One pass of a rank over a loader.

    Attributes:
        dataset: the number of the data set, in the order in which this rank uses them.
        length, num_batches: of the data set and of the loader; None: they have none.
        drop_last: whether the loader or its sampler has this option.
        is_subset: the loader's data set is a Subset.
        ids: the samples of each batch: their indices, or hashes of their contents.
        is_grad: a batch was taken while gradients were enabled.
        is_ended: the loop has requested a batch after the last one.
        is_trimmed: Accelerate has removed the padding from results.
        num_backwards: backward passes while it was open, if `is_grad`.
    """

    dataset: int
    length: int | None
    num_batches: int | None
    drop_last: bool = False
    is_subset: bool = False
    ids: list[list[int | str]] = []
    is_grad: bool = False
    is_ended: bool = False
    is_trimmed: bool = False
    num_backwards: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the pass reached the end of the loader. Lightning requests none after the last batch."""
        return self.is_ended or len(self.ids) == self.num_batches

    @property
    def samples(self) -> list[int | str]:
        """The ids of all batches."""
        return [each for batch in self.ids for each in batch]

    @property
    def num_samples(self) -> int | None:
        """The number of samples in its data set; None if it is not known."""
        return len({*self.samples}) if self.length is None and self.is_complete else self.length


class Update(msgspec.Struct):
    """A step of an optimizer. Tensors are projected, see `plain_recorder`.

    Attributes:
        optimizer: its number.
        num_elements: of its parameters, on this rank.
        num_samples: of the backward passes since the last update; nan if it is not known.
        computed: the gradient of this rank; None if it was not seen.
        used: the gradient in `.grad`.
        after: the weights.
    """

    optimizer: int
    num_elements: int
    num_samples: float
    computed: list[float] | None
    used: list[float]
    after: list[float]


class PlainRank(msgspec.Struct):
    """The record of one rank.

    Attributes:
        passes: in the order in which they began.
        updates: of all optimizers.
        is_cut: the recorder has ended the script after the steps of the trial.
    """

    rank: int = -1
    passes: list[Pass] = []
    updates: list[Update] = []
    is_cut: bool = False

    @property
    def num_steps(self) -> int:
        """The largest number of updates of an optimizer."""
        return max(Counter(update.optimizer for update in self.updates).values(), default=0)

    def list_passes(self, *, is_training: bool) -> list[Pass]:
        """Return its passes in order: those with backward passes, or the others."""
        return [each for each in self.passes if each.ids and (each.num_backwards > 0) == is_training]


def read_ranks(directory: Path) -> list[PlainRank]:
    """Read the records of the processes that made an update, in the order of their ranks."""
    paths = directory.glob("*.record")
    ranks = [msgspec.msgpack.decode(read_bytes(path), type=PlainRank) for path in paths]
    return sorted((each for each in ranks if each.updates), key=lambda each: each.rank)
