"""Makes copies of the optimizers' state that have died with a rank again: `Run(shard="optimizer", shard_copies=2)`."""

from samestep.engine.passes import Reduced
from samestep.train.divided_state import DividedOptimizers
from samestep.train.metrics import RunMetrics
from samestep.train.prepared import TrainedParameters
from samestep.train.step import Step, StepObserver


class LostCopies(StepObserver):
    """Lets ranks copy the state that only one of them has, before the first pass of a step.

    There, no gradient waits for its update. All ranks must do this before the same step, and one of them may notice a
    death a collective later than another one. So they go by the number of ranks in the last exchange, on which all
    agree.
    """

    def __init__(self, divided: DividedOptimizers, parameters: TrainedParameters, metrics: RunMetrics) -> None:
        self._divided = divided
        self._parameters = parameters
        self._metrics = metrics

    def exchanged(self, step: Step, reduced: Reduced) -> None:
        self._divided.note_exchange(len(reduced.votes))

    def begin_pass(self, step: Step) -> None:
        if not step.num_passes and self._divided.lacks_copies:
            self._metrics.complete_checksums()  # the new owners did not have the last gradient
            self._divided.copy_lost()
            self._parameters.renew()
