"""Sums gradients: folds a rank's micro-batches, exchanges the parts of all ranks, leaves the sum in `.grad`.

Uses post-accumulate-grad hooks and flat buckets over torch.distributed, as in DDP (Li et al. 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training"). Unlike DDP, it is prepared in the backward pass and
not in the forward pass, sums along the canonical tree (`plan/tree.py`), and supports idle ranks and unused parameters.

A pass over a step's micro-batches is `begin`, then for each of this rank's micro-batches `open`, `backward` (once
per model) and `close`, then `finish` and `assign`. Further losses, which have separate total weights, are summed
separately: for each of them, `backward_further` in the micro-batches, and `finish_further` and `assign` at the end.
"""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.engine import routes
from samestep.engine.backward import build_seed, has_reentrant_checkpoint
from samestep.engine.buckets import Bucket, BucketBuffers, build_buckets, choose_cap_bytes, dense_strides
from samestep.engine.control import Control, ControlFormat
from samestep.engine.folding import MISSED, USED, Further, Grads, add, fold, lay_out, put, to_dense
from samestep.errors import UsageError
from samestep.plan.tree import Layout, merges
from samestep.torch_internals import get_storage, read_version, run_backward
from samestep.world.group import Group


class Reducer:
    """Sums the gradients of `params` over a step's micro-batches on all ranks.

    Args:
        params: (name, parameter, slot) in the models' order. The slot selects the losses of the parameter.
        group: the ranks.
        exact: whether to sum along the canonical tree; otherwise use the backend's all-reduce.
        bucket_cap_bytes: maximum size of a bucket; None: the result of `choose_cap_bytes`.
        untrained: parameters that no optimizer holds. Their gradients are not reduced, and are dropped.

    Attributes:
        waited_s: seconds that the last backward waited for exchanges, and so for other ranks.
        in_micro_batch: whether a micro-batch is open.
        inspect: called with each gradient of a micro-batch, before it is added to others: the number of the parameter,
            the number of the loss, the gradient. None: not called.
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
        self._buffers: dict[Layout, list[BucketBuffers]] = {}
        self._views_of: dict[Layout, list[tuple[Tensor, ...]]] = {}  # each parameter's pieces of this rank's parts
        self._controls: dict[Layout, tuple[ControlFormat, Tensor | None, list[memoryview]]] = {}
        self.in_micro_batch = self._in_backward = self._last = self._is_borrowed = False
        self.inspect: Callable[[int, int, Tensor], None] | None = None
        self.waited_s = 0.0
        self._checked: set[tuple[int, ...]] = set()
        kinds = {(param.dtype, param.device) for param in self.params}
        self._zeros = {(dtype, device): torch.zeros((), dtype=dtype, device=device) for dtype, device in kinds}
        self._hooks: dict[int, RemovableHandle] = {}

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()

    # --- one pass over a step's micro-batches -----------------------------------------------------------------

    def begin(self, layout: Layout, *, keep_grads: bool, num_names: int = 0) -> None:
        """Begin a pass.

        Args:
            keep_grads: whether this is a further pass over the same step, so that gradients that it does not compute
                are kept.
            num_names: number of logged values in the control block.
        """
        if num_names != self._num_names:
            self._num_names = num_names
            self._buffers.clear()
        self.layout = layout
        self._range = layout.ranges[self._group.rank]
        self._kept: Grads = [None] * len(self.params)
        if keep_grads:  # copies, because this pass reuses the memory
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
        # Of each bucket: its parameters, their sums, and the memory that holds these in one piece, if there is one.
        self._sums: list[tuple[Sequence[int], Sequence[Tensor | None], Tensor | None]] = []
        self._pending: list[routes.PendingOp] = []
        for i, param in enumerate(self.params):
            if param.requires_grad and i not in self._hooks:  # a script may unfreeze it at any step
                hook = param.register_post_accumulate_grad_hook(self._build_hook(i))  # type: ignore[no-untyped-call]
                self._hooks[i] = hook
        for bucket in self._buckets:
            bucket.missing = sum(param.requires_grad for param in bucket.params)
        if self._group.world_size > 1:
            if layout not in self._buffers or any(buffers.is_kept for buffers in self._buffers[layout]):
                self._build_buffers(layout)
            self._views = self._views_of[layout]
            for tag, buffers in enumerate(self._buffers[layout]):
                buffers.expect(tag)

    def open(self, v: int) -> None:
        """Begin micro-batch v. Gradients of a micro-batch of another rank are passed to `inspect` only."""
        self._v = v
        self._is_borrowed = v not in self._range
        if self._is_borrowed:  # after `finish`, `.grad` still holds the rank's own part
            self._drop_grads()
        self._last = v == self._range.stop - 1 and self._group.world_size > 1 and not self._is_borrowed
        self._fired[:] = bytes(len(self.params))
        self._places: set[int] = set()
        self._grads: list[tuple[int, Tensor, int]] = []
        if self._last:
            self._merges_left = self._num_merges()
        self.in_micro_batch = True

    def backward(self, loss: Tensor, factor: float | Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Run the backward pass of `factor * loss` for all parameters (`inputs` empty) or for some."""
        gradient = build_seed(factor, loss)
        self._in_backward, self.waited_s = True, 0.0
        try:
            run_backward((loss,), (gradient,), False, False, inputs, allow_unreachable=True, accumulate_grad=True)
        finally:
            self._in_backward = False

    def backward_further(self, k: int, loss: Tensor, factor: float | Tensor, inputs: tuple[Tensor, ...]) -> None:
        """Same as `backward`, for further loss k (1, 2, ...). Call before `backward`, which frees the graph."""
        if k not in self._further and not self._is_borrowed:
            self._further[k] = self._build_further(has_missed=self._v > self._range.start)
        wanted = {id(param) for param in inputs}
        indices = [i for i, p in enumerate(self.params) if (id(p) in wanted if inputs else p.requires_grad)]
        params, seed = tuple(self.params[i] for i in indices), (build_seed(factor, loss),)
        found = run_backward((loss,), seed, True, False, params, allow_unreachable=True, accumulate_grad=False)
        for i, grad in zip(indices, found, strict=True):
            if grad is not None and self.inspect is not None:
                self.inspect(i, k, to_dense(grad))
            if grad is not None and not self._is_borrowed:
                # A copy: autograd may return a view, or one tensor for two parameters.
                self._further[k].grads[i] = lay_out(to_dense(grad), self._strides[i])

    def check_graph(self, loss: Tensor, kind: tuple[int, ...]) -> None:
        """Refuse reentrant checkpoints before a backward pass to given parameters, which they hide without an error.

        Args:
            kind: pass, slot, number of the loss. Only the first call of each kind is checked, because models use
                checkpoints in the same way in all steps.

        Raises:
            Error: the graph contains such a checkpoint.
        """
        if kind in self._checked:
            return
        self._checked.add(kind)
        if has_reentrant_checkpoint(loss):
            raise UsageError(
                "step.backward(model=...), or of several losses, with reentrant activation checkpointing, which hides "
                "parameters from it: use torch.utils.checkpoint with use_reentrant=False"
            )

    def close(self) -> None:
        """End the micro-batch, and fold it into the parts held unless it is the last of this rank."""
        self.in_micro_batch = False
        for param in self._untrained:
            param.grad = None
        for i, grad, version in self._grads:
            if self.params[i].grad is not grad or read_version(grad) != version:
                self._refuse_change(i)
        self._grads.clear()  # views of buckets, to which no reference may remain when the next pass begins
        if self._is_borrowed:
            self._drop_grads()
            return
        fired = int.from_bytes(self._fired)
        self._used |= fired * USED | (fired ^ self._all_fired) * MISSED
        is_last = self._v == self._range.stop - 1
        for further in self._further.values():
            further.close(None if is_last else self._num_merges())
        if is_last:
            self._check_unchanged()
            return  # `finish` folds it, bucket by bucket, while sending
        grads: Grads = []
        for param in self.params:
            grads.append(param.grad)
            param.grad = None
        fold(self._held, grads, self._num_merges())

    def finish(self, control: Control) -> list[Control]:
        """Complete the sums, for `assign`. Returns every rank's control block."""
        if self._group.world_size == 1:
            self._finish_alone()
            return [control]
        form, rows, blocks = self._controls[self.layout]
        control.used = self._used.to_bytes(len(self.params))
        form.pack_into(blocks[self._group.rank], control)
        for _ in range(len(self._pending), len(self._buckets)):
            self._launch()
        if rows is not None:
            sockets = self._group.local_sockets
            direct = routes.run_direct(rows, self._group.rank, len(self._buckets), local_sockets=sockets)
            self._pending.append(routes.PendingOp(direct))
        routes.wait_all(self._pending)
        buckets = zip(self._buckets, self._buffers[self.layout], strict=True)
        self._sums = [(bucket.indices, buffers.grads, buffers.root) for bucket, buffers in buckets]
        controls = [
            control if rank == self._group.rank else form.unpack_from(block, len(held))
            for rank, (block, held) in enumerate(zip(blocks, self.layout.ranges, strict=True))
        ]
        for each in controls:
            self._used |= int.from_bytes(each.used)
        return controls

    def finish_further(self, k: int, control: Control) -> list[Control]:
        """Same as `finish`, for further loss k. Call it after `assign` for the previous loss, to reuse its memory."""
        pairs = [*zip(self.params, self._kept, strict=True)]
        self._totals = [None if p.grad is None or p.grad is kept else p.grad.clone() for p, kept in pairs]
        further = self._further.pop(k, None) or self._build_further(has_missed=bool(self._range))
        self._held, self._used, self._pending = further.held, further.used, []
        self._fired[:] = bytes(len(self.params))
        for param, grad in zip(self.params, further.grads, strict=True):
            param.grad = grad
        for tag, buffers in enumerate(self._buffers.get(self.layout, ())):
            buffers.expect(tag)
        return self.finish(control)

    def assign(self, inverses: Sequence[float]) -> None:
        """Set `.grad` to `sum * inverse`, or to None if no micro-batch of the step used the parameter.

        Args:
            inverses: per slot, the inverse of the total weight; 0 if that is 0.
        """
        used = self._used.to_bytes(len(self.params))
        for indices, grads, flat in self._sums:
            scales = [(grad, inverses[self.slots[i]], used[i]) for i, grad in zip(indices, grads, strict=True)]
            shared = {inverse for _, inverse, _ in scales}
            is_used = any(marks & USED for *_, marks in scales)
            if flat is not None and is_used and len(shared) == 1 and shared != {1.0}:
                scales = [(flat, shared.pop(), USED)]
            for total, inverse, marks in scales:
                # 0 + inverse * x, because the sign of a sum of -0.0 would otherwise depend on whether an absent
                # gradient was sent as +0.0. If none was absent and the factor is 1 (the backward applies powers of
                # two), nothing has to be done, which saves a pass over all memory.
                if total is not None and marks & USED and (inverse != 1.0 or marks & MISSED):
                    torch.add(self._zeros[total.dtype, total.device], total, alpha=inverse, out=total)
            for i, grad in zip(indices, grads, strict=True):
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
                    raise UsageError(
                        "loss.backward() was called inside the micro-batch loop: call step.backward(loss), which "
                        "weights the loss and sums over ranks; for an input's gradient, torch.autograd.grad(loss, x)"
                    )
                return
            if self._fired[i]:
                raise UsageError(
                    f"{self.names[i]} got two gradients in one micro-batch (reentrant activation checkpointing?): "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            grad = param.grad
            if grad is None:  # an autograd.Function returned none, or a hook removed it: same as unused
                return
            if grad.layout is not torch.strided:
                param.grad = grad = to_dense(grad)
            self._fired[i] = 1
            if self.inspect is not None:
                self.inspect(i, 0, grad)
            if self._last:
                # Packed now, while it is in the cache, so that its memory is reused for the next gradient. `.data`,
                # because views of one bucket would share a version.
                param.grad = grad = self._pack(i, grad).data
            elif (place := get_storage(grad)) in self._places:
                param.grad = grad = grad.clone()  # one tensor for two parameters, or views that may overlap
            else:
                self._places.add(place)
            self._grads.append((i, grad, read_version(grad)))
            if self._last:
                bucket = self._bucket_of[i]
                bucket.missing -= 1
                # The last bucket waits for the control block, in `finish`.
                while len(self._pending) < len(self._buckets) - 1 and not self._next_bucket().missing:
                    began_s = time.monotonic()
                    self._launch()
                    self.waited_s += time.monotonic() - began_s

        return on_grad

    def _build_further(self, *, has_missed: bool) -> Further:
        """Build a further loss that is new on this rank. `has_missed`: earlier micro-batches did not have it."""
        nothing: Grads = [None] * len(self.params)
        return Further([nothing for _ in self._held], [*nothing], self._all_fired * MISSED * has_missed)

    def _drop_grads(self) -> None:
        for param in self.params:
            param.grad = None

    def _mark_params(self) -> list[tuple[int, bool]]:
        return [(read_version(param), param.requires_grad) for param in self.params]

    def _find_params(self) -> list[int]:
        """Return the address of each parameter, because `param.data = ...` does not change its version."""
        return [param.data_ptr() for param in self.params]

    def has_new_weights(self) -> bool:
        """Return whether any parameter was written to, or got other memory, since the last pass began."""
        is_written = any(was[0] != now[0] for was, now in zip(self._marks, self._mark_params(), strict=True))
        return is_written or self._find_params() != self._places_of_params

    def _follow_params(self, places: list[int]) -> None:
        """Accept parameters whose memory the script has replaced between two passes."""
        self._places_of_params = places
        for name, param, kind in zip(self.names, self.params, self._kinds, strict=True):
            if (param.shape, param.dtype) != kind:
                raise UsageError(
                    f"{name} was converted or given another shape in the loop: change the model before run.prepare"
                )

    def _check_unchanged(self) -> None:
        """Raise Error if weights were changed, frozen or unfrozen since the pass began."""
        has_moved = map(int.__ne__, self._places_of_params, self._find_params())
        for name, before, now, moved in zip(self.names, self._marks, self._mark_params(), has_moved, strict=True):
            if before[0] != now[0] or moved:
                raise UsageError(
                    f"{name} was changed inside the micro-batch loop (by the model's forward, as nn.Embedding(max_norm="
                    "...) does, or by assigning .data?), so that the gradient depends on the rank: change "
                    "weights after the loop; if it is a data-dependent initialization (ActNorm), run one forward pass "
                    "after run.prepare, before the loop"
                )
            if before[1] != now[1]:
                raise UsageError(
                    f"requires_grad of {name} was changed inside the micro-batch loop, so that the gradient depends on "
                    "the rank: change it before or after the loop"
                )

    def _refuse_change(self, i: int) -> NoReturn:
        if self.params[i].grad is None:
            raise UsageError(
                f"the gradient of {self.names[i]} is None at the end of micro-batch {self._v}: remove zero_grad(), "
                "which is not needed"
            )
        raise UsageError(
            f"the gradient of {self.names[i]} was changed in micro-batch {self._v} (by zero_grad, clipping, or a hook "
            "registered after run.prepare?), while it is only a partial sum: change it after the micro-batch loop"
        )

    def _next_bucket(self) -> Bucket:
        return self._buckets[len(self._pending)]

    def _num_merges(self) -> int:
        if not self._exact and self._v == self._range.stop - 1:
            return len(self._held)  # the order does not matter: merge all
        return len(merges(self.layout.num_micro_batches, self._range.start, self._v))

    def _launch(self) -> None:
        """Start the exchange of the next bucket, and advance that of the bucket before it."""
        position = len(self._pending)
        bucket, buffers = self._buckets[position], self._buffers[self.layout][position]
        if self._range:
            for i in bucket.indices:
                if not self._fired[i]:
                    self._pack(i, self.params[i].grad)
        elif not self._exact:
            buffers.root.zero_()
        self._pending.append(routes.PendingOp(buffers.exchange(tag=position)))
        # At this fixed point, so that all ranks issue their messages in the same order.
        if position and self._buffers[self.layout][position - 1].route in ("butterfly", "chunks"):
            self._pending[position - 1].advance()

    def _pack(self, i: int, grad: Tensor | None) -> Tensor:
        """Copy this rank's parts of parameter i into its bucket. Returns the view that holds the last part."""
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
        # As with more ranks, gradients get the parameter's strides, because norms sum in memory order.
        sums = [
            grad if grad is None or grad.stride() == strides else lay_out(grad, strides)
            for grad, strides in zip(sums, self._strides, strict=True)
        ]
        self._sums = [(range(len(sums)), sums, None)]

    def _build_buffers(self, layout: Layout) -> None:
        form = ControlFormat(layout, self._num_slots, len(self.params), self._num_values, self._num_names)
        # With GPUs the control block stays in host memory, because only the host reads it.
        staged = {bucket.device: self._group.needs_staging(bucket.device) for bucket in self._buckets}
        all_buffers = [
            BucketBuffers(
                bucket,
                layout,
                self._group.rank,
                exact=self._exact,
                control_bytes=form.size_bytes
                if bucket is self._buckets[-1] and (bucket.device.type == "cpu" or staged[bucket.device])
                else 0,
                local_sockets=self._group.local_sockets,
                device=bucket.device,
                is_staged=staged[bucket.device],
            )
            for bucket in self._buckets
        ]
        blocks, own_rows = all_buffers[-1].blocks, None
        if not blocks:
            own_rows = torch.zeros(layout.world_size, form.size_bytes, dtype=torch.uint8)
            blocks = [memoryview(row.numpy()) for row in own_rows]
        self._buffers[layout] = all_buffers
        views = {
            i: pieces
            for bucket, buffers in zip(self._buckets, all_buffers, strict=True)
            for i, pieces in zip(bucket.indices, buffers.part_views, strict=True)
        }
        self._views_of[layout] = [views[i] for i in range(len(self.params))]
        self._controls[layout] = (form, own_rows, blocks)
