"""The trained parameters: those of the optimizers, whose gradients are reduced."""

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter, itemgetter

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from samestep.engine.passes import Gradients
from samestep.train.state.names import list_named
from samestep.train.state.stateful import Objects, name_optimizers
from samestep.train.step.steps import Step, StepObserver

read_groups = attrgetter("param_groups")
read_params = itemgetter("params")


class TrainedParameters(StepObserver):
    """Passes the trained parameters to `Gradients`, again after each change by the script (add_param_group).

    Args:
        held: the optimizers that prepared objects hold.
    """

    def __init__(
        self, objects: Objects, modules: Mapping[str, nn.Module], gradients: Gradients, held: Iterable[Optimizer]
    ) -> None:
        self._modules = modules
        self._gradients = gradients
        self._optimizers = [*name_optimizers(objects).values()]
        if self._optimizers:  # with wrappers alone, all parameters are trained
            self._optimizers += held
        self._held: list[int] | None = None
        self.begin_pass()

    def begin_pass(self, step: Step | None = None) -> None:
        groups = chain.from_iterable(map(read_groups, self._optimizers))
        held = [*map(id, chain.from_iterable(map(read_params, groups)))]
        if held == self._held:
            return
        self._held = held
        wanted = {*held}
        trained: dict[int, tuple[str, nn.Parameter]] = {}
        others: list[nn.Parameter] = []
        for name, module in self._modules.items():
            for path, param in list_named(module):
                # Without an optimizer, all parameters are trained except those of averaged models.
                if id(param) in wanted if wanted else not isinstance(module, AveragedModel):
                    trained.setdefault(id(param), (f"{name}.{path}", param))
                else:
                    others.append(param)
        self._gradients.set_parameters([*trained.values()], [param for param in others if id(param) not in trained])
