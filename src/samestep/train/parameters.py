"""Follows the parameters that the optimizers hold, whose gradients are reduced."""

from collections.abc import Mapping

from torch import nn

from samestep.engine.gradient_pass import GradientPass
from samestep.train.stateful import Objects, find_trained, find_untrained, held_params
from samestep.train.steps import Step, StepObserver


class TrainedParameters(StepObserver):
    """Passes them to the gradient pass, again whenever a script has changed them (add_param_group)."""

    def __init__(self, objects: Objects, modules: Mapping[str, nn.Module], gradients: GradientPass) -> None:
        self._objects, self._modules, self._gradients = objects, modules, gradients
        self._held: list[int] | None = None
        self.follow()

    def begin_pass(self, step: Step) -> None:
        self.follow()

    def follow(self) -> None:
        """Look for a change."""
        if (held := held_params(self._objects)) != self._held:
            self._held, trained = held, find_trained(self._objects, self._modules)
            self._gradients.set_parameters(trained, find_untrained(self._modules, trained))
