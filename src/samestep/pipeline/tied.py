"""Weights that several stages use, such as those of tied embeddings.

Each stage computes a gradient of its own, with a parameter of its own in the memory of the weight. Each is summed over
the micro-batches like that of any parameter, and the sums are added in the order of the stages. So the order of the
additions is the same where the stages are on one rank. All ranks with such a stage hold the weight and update it alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engine.leaf import drop_grads
from samestep.pipeline.messages import Messages
from samestep.pipeline.stages import StagedModel


class TiedWeights:
    """The weights of a model that several stages use.

    Args:
        held: the stages of this rank.
        positions: of the rank that has each stage, in the pipeline.
        is_running: returns whether the pipeline runs the model.
    """

    def __init__(
        self, staged: StagedModel, held: range, positions: list[int], messages: Messages, is_running: Callable[[], bool]
    ) -> None:
        self._positions = positions
        self._messages = messages
        self._is_running = is_running
        # Per weight and stage, the parameter that gets the gradient of the stage; on the meta device for other ranks.
        self._leaves: dict[nn.Parameter, dict[int, nn.Parameter]] = {}
        for weight, uses in staged.tied.items():
            leaves = self._leaves[weight] = {}
            for stage, modules in uses.items():
                data = weight.detach() if stage in held else torch.empty_like(weight, device="meta")
                leaves[stage] = leaf = nn.Parameter(data, weight.requires_grad)
                for module, key in modules:
                    module.register_forward_pre_hook(partial(self._use, key, leaf, weight))
                    module.register_forward_hook(partial(self._restore, key, weight), always_call=True)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights. Within a pass, they have no gradients, unless the script uses them outside of their modules."""
        return [*self._leaves]

    def __deepcopy__(self, memo: Any) -> "TiedWeights":
        return self  # as for `Pipeline`

    def _use(self, key: str, leaf: nn.Parameter, weight: nn.Parameter, module: nn.Module, args: Any) -> None:
        """A module begins: let it use the parameter of its stage."""
        if self._is_running():
            leaf.requires_grad_(weight.requires_grad)
            if not leaf.is_meta:
                leaf.data = weight.data
            setattr(module, key, leaf)

    def _restore(self, key: str, weight: nn.Parameter, module: nn.Module, args: Any, output: Any) -> None:
        if getattr(module, key) is not weight:
            setattr(module, key, weight)

    def split(self, name: str, param: nn.Parameter) -> list[tuple[str, nn.Parameter]]:
        """Return a parameter, or those of each stage in place of a tied weight. The same names on all ranks."""
        return [
            (f"{name} in stage {stage}" if number else name, leaf)
            for number, (stage, leaf) in enumerate(self._leaves.get(param, {0: param}).items())
        ]

    def merge(self) -> None:
        """Add the gradients of the stages, in their order, on each rank that has one of them. On all ranks."""
        if not self._leaves:
            return
        for weight, total in self._messages.group.complete(self._add).items():
            weight.grad = total
            drop_grads([*self._leaves[weight].values()])

    def _add(self) -> dict[nn.Parameter, Tensor | None]:
        """Return the sum for each weight that this rank has."""
        own = self._messages.position
        totals: dict[nn.Parameter, Tensor | None] = {}
        for weight, leaves in self._leaves.items():
            positions = sorted({self._positions[stage] for stage in leaves})
            if own not in positions:
                continue
            total: Tensor | None = None
            for stage, leaf in leaves.items():
                grad = leaf.grad
                if self._positions[stage] == own:
                    for target in (position for position in positions if position != own):
                        self._messages.send_if_any(grad, target)
                else:
                    grad = self._messages.receive_if_any(weight, self._positions[stage])
                if grad is not None:
                    total = grad if total is None else total + grad  # not in place: it may be repeated
            totals[weight] = total
        self._messages.finish()
        return totals
