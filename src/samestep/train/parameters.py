"""The trained parameters: those of the optimizers, whose gradients are reduced."""

from collections.abc import Mapping

from torch import nn
from torch.optim.swa_utils import AveragedModel

from samestep.engine.gradient_pass import GradientPass
from samestep.train.stateful import Objects, find_held_optimizers, optimizers
from samestep.train.steps import Step, StepObserver


class TrainedParameters(StepObserver):
    """Passes the trained parameters to the gradient pass, again after each change by the script (add_param_group)."""

    def __init__(self, objects: Objects, modules: Mapping[str, nn.Module], gradients: GradientPass) -> None:
        self._modules, self._gradients = modules, gradients
        self._optimizers = optimizers(objects)
        if self._optimizers:  # with wrappers alone, all parameters are trained
            self._optimizers += find_held_optimizers(objects)
        self._held: list[int] | None = None
        self._follow()

    def begin_pass(self, step: Step) -> None:
        self._follow()

    def _follow(self) -> None:
        held = [id(param) for o in self._optimizers for group in o.param_groups for param in group["params"]]
        if held == self._held:
            return
        self._held, wanted = held, {*held}
        trained: dict[int, tuple[str, nn.Parameter, int]] = {}  # name, parameter, slot of its module
        others: list[nn.Parameter] = []
        for slot, (name, module) in enumerate(self._modules.items(), start=1):
            for path, param in module.named_parameters():
                # Without an optimizer, all parameters are trained except those of averaged models.
                if id(param) in wanted if wanted else not isinstance(module, AveragedModel):
                    trained.setdefault(id(param), (f"{name}.{path}", param, slot))
                else:
                    others.append(param)
        self._gradients.set_parameters([*trained.values()], [param for param in others if id(param) not in trained])
