"""One gradient from many: folds a rank's micro-batches, exchanges what all ranks hold, leaves the sum in `.grad`.

Post-accumulate-grad hooks and flat buckets over torch.distributed, as DDP has inside (Li et al. 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training"), but armed by the backward and not by a forward,
summing along the canonical tree (`plan/tree.py`), and at ease with idle ranks and parameters that nobody used.

A pass over a step's micro-batches is `begin`, then for each of this rank's micro-batches `open`, `backward` (once
per model) and `close`, then `finish` and `assign`. Losses beyond the first that have a total weight of their own are
added up apart: for each of them, `backward_further` in the micro-batches, and `finish_further` and `assign` at the end.
"""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.engine import routes
from samestep.engine.backward import build_seed, has_reentrant_checkpoint
from samestep.engine.buckets import Bucket, Transit, build_buckets, choose_cap_bytes, dense_strides
from samestep.engine.control import Control, ControlFormat
from samestep.engine.folding import MISSED, USED, Further, Grads, add, fold, lay_out, put
from samestep.errors import Error
from samestep.plan.tree import Layout, merges
from samestep.torch_internals import get_storage, read_version, run_backward
from samestep.world.group import Group


class Reducer:
    """Sums the gradients of `params` over a step's micro-batches, wherever they were computed.

    Args:
        params: (name, parameter, slot) in the models' order; the slot says whose losses the parameter answers to.
        group: the ranks.
        exact: along the canonical tree; else by the backend's all-reduce.
        bucket_cap_bytes: how large a bucket may grow; None: as `choose_cap_bytes` has it.
        untrained: parameters that no optimizer holds; their gradients, of this rank alone, are dropped.

    Attributes:
        waited_s: how long the newest backward waited for exchanges, and so for other ranks.
        in_micro_batch: a micro-batch is open.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, int]],
        group: Group,
        *,
        exact: bool,
        bucket_cap_bytes: int | None,
        num_slots: int,
        num_values: int,
        untrained: Sequence[nn.Parameter] = (),
    ) -> None:
        self._untrained = untrained
        self.params = [param for _, param, _ in params]
        self.names = [name for name, _, _ in params]
        self.slots = [slot for _, _, slot in params]
        self._group, self._exact = group, exact
        self._num_slots, self._num_values, self._num_names = num_slots, num_values, 0
        self._kinds = [(param.shape, param.dtype) for param in self.params]
        self._places_of_params = self._find_params()
        self._strides = [dense_strides(param) for param in self.params]
        if bucket_cap_bytes is None:
            one_host = group.world_size == 1 or group.local_sockets is not None
            bucket_cap_bytes = choose_cap_bytes(self.params, one_host=one_host)
        self._buckets = build_buckets(self.params, bucket_cap_bytes)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._fired = bytearray(len(self.params))
        self._used = 0  # a byte per parameter, see USED
        self._all_fired = int.from_bytes(b"\1" * len(self.params))
        self._transits: dict[Layout, list[Transit]] = {}
        self._views_of: dict[Layout, list[tuple[Tensor, ...]]] = {}  # each parameter's pieces of this rank's parts
        self._controls: dict[Layout, tuple[ControlFormat, Tensor | None, list[memoryview]]] = {}
        self.in_micro_batch = self._in_backward = self._last = False
        self.waited_s = 0.0
        self._checked: set[tuple[int, ...]] = set()
        self._zeros = {param.dtype: torch.zeros((), dtype=param.dtype, device=param.device) for param in self.params}
        self._hooks: dict[int, RemovableHandle] = {}

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks.values():
            hook.remove()

    # --- one pass over a step's micro-batches -----------------------------------------------------------------

    def begin(self, layout: Layout, *, keep_grads: bool, num_names: int = 0) -> None:
        """A pass begins.

        Args:
            keep_grads: a further pass over the same step: gradients that it leaves alone stay as they are.
            num_names: of values that the control block has places for.
        """
        if num_names != self._num_names:
            self._num_names = num_names
            self._transits.clear()
        self.layout = layout
        self._range = layout.ranges[self._group.rank]
        self._kept: Grads = [None] * len(self.params)
        if keep_grads:  # copies: the pass about to begin reuses the memory
            self._kept = [None if param.grad is None else param.grad.clone() for param in self.params]
        for param in (*self.params, *self._untrained):
            param.grad = None
        self._marks = self._mark_params()
        if (places := self._find_params()) != self._places_of_params:
            self._follow_params(places)
        self._held: list[Grads] = []
        self._used = 0
        self._further: dict[int, Further] = {}
        self._totals: Grads = []  # of the losses before the one that is being finished
        self._flights: list[routes.Flight] = []
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooks:  # a script may unfreeze it at any step
                hook = param.register_post_accumulate_grad_hook(self._build_hook(i))  # type: ignore[no-untyped-call]
                self._hooks[i] = hook
        for bucket in self._buckets:
            bucket.missing = sum(param.requires_grad for param in bucket.params)
        if self._group.world_size > 1:
            if layout not in self._transits or any(transit.is_kept for transit in self._transits[layout]):
                self._build_transits(layout)
            self._views = self._views_of[layout]
            for tag, transit in enumerate(self._transits[layout]):
                transit.expect(tag)

    def open(self, v: int) -> None:
        """Micro-batch v begins."""
        self._v = v
        self._last = v == self._range.stop - 1 and self._group.world_size > 1
        self._fired[:] = bytes(len(self.params))
        self._places: set[int] = set()
        self._grads: list[tuple[int, Tensor, int]] = []
        if self._last:
            self._merges_left = self._num_merges()
        self.in_micro_batch = True

    def backward(self, loss: Tensor, factor: float | Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Runs the backward of `factor * loss` for all parameters (`inputs` empty) or for some."""
        gradient = build_seed(factor, loss)
        self._in_backward, self.waited_s = True, 0.0
        try:
            run_backward((loss,), (gradient,), False, False, inputs, allow_unreachable=True, accumulate_grad=True)
        finally:
            self._in_backward = False

    def backward_further(self, k: int, loss: Tensor, factor: float | Tensor, inputs: tuple[Tensor, ...]) -> None:
        """As `backward`, of further loss k (1, 2, ...); before that of the first loss, whose graph it leaves alone."""
        if k not in self._further:
            self._further[k] = self._build_further(has_missed=self._v > self._range.start)
        wanted = {id(param) for param in inputs}
        indices = [i for i, p in enumerate(self.params) if (id(p) in wanted if inputs else p.requires_grad)]
        params, seed = tuple(self.params[i] for i in indices), (build_seed(factor, loss),)
        found = run_backward((loss,), seed, True, False, params, allow_unreachable=True, accumulate_grad=False)
        for i, grad in zip(indices, found, strict=True):
            if grad is not None:  # a copy: what autograd gives may be a view, or one tensor for two parameters
                self._check_dense(i, grad)
                self._further[k].grads[i] = lay_out(grad, self._strides[i])

    def check_graph(self, loss: Tensor, kind: tuple[int, ...]) -> None:
        """Before a backward to given parameters: none may be within a reentrant checkpoint, which hides them, often
        without an error of torch's.

        Args:
            kind: pass, slot, number of the loss. The first of each is looked at: models are checkpointed alike in all
                steps.

        Raises:
            Error: there is such a checkpoint.
        """
        if kind in self._checked:
            return
        self._checked.add(kind)
        if has_reentrant_checkpoint(loss):
            raise Error(
                "step.backward(model=...), or of several losses, with reentrant activation checkpointing, which hides "
                "parameters from it: use torch.utils.checkpoint with use_reentrant=False"
            )

    def close(self) -> None:
        """The micro-batch is done: unless it is the last of this rank's, folds it into the parts held."""
        self.in_micro_batch = False
        for param in self._untrained:
            param.grad = None
        for i, grad, version in self._grads:
            if self.params[i].grad is not grad or read_version(grad) != version:
                self._refuse_change(i)
        self._grads.clear()  # views of buckets, which nobody else is to hold when the next pass begins
        fired = int.from_bytes(self._fired)
        self._used |= fired * USED | (fired ^ self._all_fired) * MISSED
        is_last = self._v == self._range.stop - 1
        for further in self._further.values():
            further.close(None if is_last else self._num_merges())
        if is_last:
            self._check_unchanged()
            return  # `finish` folds it, bucket by bucket, on the way out
        grads: Grads = []
        for param in self.params:
            grads.append(param.grad)
            param.grad = None
        fold(self._held, grads, self._num_merges())

    def finish(self, control: Control) -> list[Control]:
        """Completes the pass: the sums are ready for `assign`. Returns every rank's control block."""
        if self._group.world_size == 1:
            self._finish_alone()
            return [control]
        form, rows, blocks = self._controls[self.layout]
        control.used = self._used.to_bytes(len(self.params))
        form.pack_into(blocks[self._group.rank], control)
        for _ in range(len(self._flights), len(self._buckets)):
            self._launch()
        if rows is not None:
            sockets = self._group.local_sockets
            direct = routes.run_direct(rows, self._group.rank, len(self._buckets), local_sockets=sockets)
            self._flights.append(routes.Flight(direct))
        routes.land(self._flights)
        for transit in self._transits[self.layout]:
            transit.complete()
        controls = [
            control if rank == self._group.rank else form.unpack_from(block, len(held))
            for rank, (block, held) in enumerate(zip(blocks, self.layout.ranges, strict=True))
        ]
        for told in controls:
            self._used |= int.from_bytes(told.used)
        return controls

    def finish_further(self, k: int, control: Control) -> list[Control]:
        """As `finish`, for further loss k; after `assign` for the one before it, whose memory serves again."""
        pairs = [*zip(self.params, self._kept, strict=True)]
        self._totals = [None if p.grad is None or p.grad is kept else p.grad.clone() for p, kept in pairs]
        further = self._further.pop(k, None) or self._build_further(has_missed=bool(self._range))
        self._held, self._used, self._flights = further.held, further.used, []
        self._fired[:] = bytes(len(self.params))
        for param, grad in zip(self.params, further.grads, strict=True):
            param.grad = grad
        for tag, transit in enumerate(self._transits.get(self.layout, ())):
            transit.expect(tag)
        return self.finish(control)

    def assign(self, inverses: Sequence[float]) -> None:
        """Leaves `sum * inverse` in `.grad`, None where no micro-batch of the step used the parameter.

        Args:
            inverses: per slot, the inverse of the total weight; 0 where that is 0, so that nothing counts.
        """
        used = self._used.to_bytes(len(self.params))
        if self._group.world_size == 1:
            for i, (param, grad) in enumerate(zip(self.params, self._sums, strict=True)):
                inverse = inverses[self.slots[i]]
                self._scale(grad, inverse, used[i])
                param.grad = grad if inverse and grad is not None else self._kept[i]
        for bucket, transit in zip(self._buckets, self._transits.get(self.layout, ()), strict=False):  # none at 1 rank
            shared = {inverses[self.slots[i]] for i in bucket.indices}
            is_whole = len(shared) == 1 and shared != {1.0}
            if is_whole:
                self._scale(transit.root, shared.pop(), USED)
            for i, grad in zip(bucket.indices, transit.grads, strict=True):
                if not is_whole:
                    self._scale(grad, inverses[self.slots[i]], used[i])
                self.params[i].grad = grad if used[i] & USED and inverses[self.slots[i]] else self._kept[i]
        for param, total, kept in zip(self.params, self._totals, self._kept, strict=False):
            if total is not None:
                param.grad = total if param.grad is None or param.grad is kept else param.grad.add_(total)
        self._totals = []

    # --- inside -----------------------------------------------------------------------------------------------

    def _build_hook(self, i: int) -> Callable[[Tensor], None]:
        def on_grad(param: Tensor) -> None:
            if not self._in_backward:
                if self.in_micro_batch:
                    raise Error(
                        "loss.backward() by hand inside the micro-batch loop: call step.backward(loss), which "
                        "weights the loss and adds up all ranks; for an input's gradient, torch.autograd.grad(loss, x)"
                    )
                return
            if self._fired[i]:
                raise Error(
                    f"{self.names[i]} got two gradients in one micro-batch (reentrant activation checkpointing?): "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            grad = param.grad
            if grad is None:  # by an autograd.Function that gave none, or a hook that took it: as good as unused
                return
            self._check_dense(i, grad)
            self._fired[i] = 1
            if self._last:
                # Now, while it is in the cache; its own memory serves the next gradient. `.data`, since views of one
                # bucket would share a version.
                param.grad = grad = self._pack(i, grad).data
            elif (place := get_storage(grad)) in self._places:
                param.grad = grad = grad.clone()  # autograd's one tensor for two parameters, or views that may overlap
            else:
                self._places.add(place)
            self._grads.append((i, grad, read_version(grad)))
            if self._last:
                bucket = self._bucket_of[i]
                bucket.missing -= 1
                # The last bucket waits for the control block, in `finish`.
                while len(self._flights) < len(self._buckets) - 1 and not self._next_bucket().missing:
                    began_s = time.monotonic()
                    self._launch()
                    self.waited_s += time.monotonic() - began_s

        return on_grad

    def _check_dense(self, i: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise Error(f"{self.names[i]} has a sparse gradient: use sparse=False in its layer, Adam for SparseAdam")

    def _build_further(self, *, has_missed: bool) -> Further:
        """A further loss that is new to this rank. `has_missed`: micro-batches before were without it."""
        nothing: Grads = [None] * len(self.params)
        return Further([nothing for _ in self._held], [*nothing], self._all_fired * MISSED * has_missed)

    def _mark_params(self) -> list[tuple[int, bool]]:
        return [(read_version(param), param.requires_grad) for param in self.params]

    def _find_params(self) -> list[int]:
        """Where each lives: `param.data = ...` counts as no change of its version."""
        return [param.data_ptr() for param in self.params]

    def has_new_weights(self) -> bool:
        """Whether any parameter was written to, or was given other memory, since the last pass began."""
        is_written = any(was[0] != now[0] for was, now in zip(self._marks, self._mark_params(), strict=True))
        return is_written or self._find_params() != self._places_of_params

    def _follow_params(self, places: list[int]) -> None:
        """Takes note of parameters that the script has given other memory between two passes."""
        self._places_of_params = places
        for name, param, kind in zip(self.names, self.params, self._kinds, strict=True):
            if (param.shape, param.dtype) != kind:
                raise Error(
                    f"{name} was converted or given another shape in the loop: change the model before run.prepare"
                )

    def _check_unchanged(self) -> None:
        """Raises Error where weights were changed, frozen or unfrozen since the pass began."""
        has_moved = map(int.__ne__, self._places_of_params, self._find_params())
        for name, before, now, moved in zip(self.names, self._marks, self._mark_params(), has_moved, strict=True):
            if before[0] != now[0] or moved:
                raise Error(
                    f"{name} was changed inside the micro-batch loop (by the model's forward, as nn.Embedding(max_norm="
                    "...) does, or by giving it other .data?), so that the gradient depends on the rank: change "
                    "weights after the loop"
                )
            if before[1] != now[1]:
                raise Error(
                    f"requires_grad of {name} was changed inside the micro-batch loop, so that the gradient depends on "
                    "the rank: change it before or after the loop"
                )

    def _refuse_change(self, i: int) -> NoReturn:
        if self.params[i].grad is None:
            raise Error(
                f"the gradient of {self.names[i]} is gone at the end of micro-batch {self._v}: zero_grad() is not "
                "needed, leave it out"
            )
        raise Error(
            f"the gradient of {self.names[i]} was changed in micro-batch {self._v} (by zero_grad, clipping, or a hook "
            "registered after run.prepare?), where it is only a part: change it after the micro-batch loop"
        )

    def _scale(self, grad: Tensor | None, inverse: float, used: int) -> None:
        """Multiplies a sum in place.

        0 + inverse * x: a sum of nothing but -0.0 would else keep a sign that depends on whether an absent gradient
        travelled as +0.0. Where none was absent, and the weights need no more than a power of two, which the
        backward has seen to, there is nothing to do: a sweep over all memory less.
        """
        if grad is not None and used & USED and (inverse != 1.0 or used & MISSED):
            torch.add(self._zeros[grad.dtype], grad, alpha=inverse, out=grad)

    def _next_bucket(self) -> Bucket:
        return self._buckets[len(self._flights)]

    def _num_merges(self) -> int:
        if not self._exact and self._v == self._range.stop - 1:
            return len(self._held)  # the order does not matter: everything into one
        return len(merges(self.layout.num_micro_batches, self._range.start, self._v))

    def _launch(self) -> None:
        """Sends the next bucket's parts; lets the bucket before it take its next stage."""
        position = len(self._flights)
        bucket, transit = self._buckets[position], self._transits[self.layout][position]
        if self._range:
            for i in bucket.indices:
                if not self._fired[i]:
                    self._pack(i, self.params[i].grad)
        elif not self._exact:
            transit.root.zero_()
        self._flights.append(transit.start(tag=position))
        # At this fixed point, so that all ranks issue their messages in one order.
        if position and self._transits[self.layout][position - 1].route in ("butterfly", "chunks"):
            self._flights[position - 1].advance()

    def _pack(self, i: int, grad: Tensor | None) -> Tensor:
        """Puts what this rank has of parameter i into its bucket, and returns where it is there."""
        views, num_stay = self._views[i], len(self._held) - self._merges_left
        for part, view in zip(self._held[:num_stay], views, strict=False):
            put(part[i], view)
        merged, view = self._held[num_stay:][::-1], views[num_stay]
        for part in merged[:-1]:
            grad = add(part[i], grad)
        left = merged[-1][i] if merged else None
        if left is not None and grad is not None:
            torch.add(left, grad, out=view)
        else:
            put(grad if left is None else left, view)
        return view

    def _finish_alone(self) -> None:
        sums: Grads = [param.grad for param in self.params]
        for part in reversed(self._held):
            sums = [add(left, right) for left, right in zip(part, sums, strict=True)]
        # With more ranks, gradients come in the parameter's strides; norms add up in memory order.
        self._sums = [
            grad if grad is None or grad.stride() == strides else lay_out(grad, strides)
            for grad, strides in zip(sums, self._strides, strict=True)
        ]

    def _build_transits(self, layout: Layout) -> None:
        form = ControlFormat(layout, self._num_slots, len(self.params), self._num_values, self._num_names)
        # On a GPU the control block stays on the host: it is the host that wants to know.
        transits = [
            Transit(
                bucket,
                layout,
                self._group.rank,
                exact=self._exact,
                control_bytes=form.size_bytes if bucket is self._buckets[-1] and bucket.device.type == "cpu" else 0,
                local_sockets=self._group.local_sockets,
            )
            for bucket in self._buckets
        ]
        blocks, own_rows = transits[-1].blocks, None
        if not blocks:
            own_rows = torch.zeros(layout.world_size, form.size_bytes, dtype=torch.uint8)
            blocks = [memoryview(row.numpy()) for row in own_rows]
        self._transits[layout] = transits
        views = {
            i: pieces
            for bucket, transit in zip(self._buckets, transits, strict=True)
            for i, pieces in zip(bucket.indices, transit.part_views, strict=True)
        }
        self._views_of[layout] = [views[i] for i in range(len(self.params))]
        self._controls[layout] = (form, own_rows, blocks)
