"""One training run: composes the ranks, the data, the gradient, snapshots and metrics into the API of a script."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from samestep.config import OPTIONS, ExchangeDtype, Precision, Shard, choice, whole
from samestep.console import hide_secrets
from samestep.data.loader import seed_all
from samestep.engine.ownership import clip_with_norm, compute_total_norm
from samestep.engine.passes import MixedPrecision
from samestep.errors import InvalidType, UsageError
from samestep.plan.order import derive
from samestep.snapshot.location import Location
from samestep.train.context import RunContext, RunState, build_config
from samestep.train.determinism import call_on_rank_0, fix_kernels, use_tf32
from samestep.train.evaluate import Evaluator
from samestep.train.guards import Call, wait_for_call
from samestep.train.interception import find_kinds, read_request
from samestep.train.loop import Epoch, Loop
from samestep.train.loop_data import Sampler, open_loop_data
from samestep.train.objects import Objects, check_objects, find_params
from samestep.train.opening import open_loop
from samestep.train.prepared import Prepared, prepare_objects, restore_models
from samestep.train.sharded_init import ShardedInit
from samestep.train.step import Step, collect_values
from samestep.train.stopping import Services, report_errors
from samestep.train.workers import INNER
from samestep.watch.progress import Progress
from samestep.watch.trackers import Tracker, Trackers
from samestep.world.group import find_ranks, open_group
from samestep.world.process_group import choose_device, find_rank

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]


class Run:
    """One training run, from its first step to its last, over all restarts.

    The run seeds all generators, so create it before the model and before random data. An option that is set on the
    command line (`samestep launch --batch-size 64`) or in the environment (`SAMESTEP_BATCH_SIZE=64`) replaces the
    argument, see docs/options.md. docs/training.md is a guide.

    Args:
        run_dir: run directory, a path or a URL for fsspec. None: write nothing and resume nothing (notebooks).
        batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: samples per forward and backward pass, which is what BatchNorm sees. The number of ranks is
            at most `batch_size / micro_batch_size`. None: 8, 4 or 2 micro-batches per step if that leaves at least 64
            samples in each, else 1.
        seed: seed of everything random.
        precision: "fp32", "bf16" or "fp16", used by `autocast`; "tf32" is fp32 with TF32 kernels on a GPU.
        shard: what the ranks divide among themselves: "optimizer" (the optimizers' state) or "fsdp2" (parameters,
            gradients and state); see docs/parallelism.md. None: every rank keeps all of it.
        shard_copies: with `shard="optimizer"`, how many ranks hold the state of each parameter. `samestep launch
            --heal` needs 2, see docs/running.md.
        pipeline: number of stages into which `prepare` cuts the model, see docs/pipeline.md. None: no pipeline.
        workers, inner_steps: number of workers, and number of inner steps that each makes in every step, see
            docs/diloco.md. The ranks divide the workers among themselves. None: no workers.
        exchange_dtype: "bf16" rounds float32 gradients and their partial sums to bfloat16, which halves the bytes of
            their exchange, see docs/parallelism.md. None: exchange them as they are.
        num_threads: CPU threads per rank. The bits depend on it, so the default is 1 on every machine.
        snapshot_every: interval of snapshots: 10 (steps), "2epochs", "30min" (s, min, h) or None. Unless it is
            None, a snapshot is also taken at the end of the run, and when a signal stops it; with None, a signal ends
            the run at once.
        keep_last: how many numbered snapshots to keep. Named snapshots are always kept.
        resume: "latest", a step, the name of a snapshot such as "best", or False.
        max_steps: total number of steps after which the run ends.
        log_every: interval of the rows in `metrics.jsonl`: 10 (steps) or "1epochs".
        compare_every: interval of replica checks, which compare the parameters of all ranks: 100 (steps), "1epochs" or
            None. Unless it is None, they are also compared before each snapshot.
        check_compute_every: interval in steps at which another rank recomputes a micro-batch of each rank, and the bits
            are compared, see docs/running.md. None: never.
        trackers: destinations for metrics: trackers such as `samestep.TensorBoard()`, and names such as "wandb".
        config: recorded in the run directory. A later start with another config warns. Strings under names such as
            `api_key` and `password` are recorded as "(hidden)".
        device: "cpu", "cuda" (local rank i uses GPU i) or one GPU for all ranks, such as "cuda:1". None: "cuda" if
            there is a GPU, else "cpu".
        deterministic: use deterministic kernels only. Otherwise, a GPU may give different bits each time.

    Attributes:
        dir: run directory or working copy; None without a directory.
        device: of this rank, for tensors that the script creates.
        local_rank: this rank's number on its machine.
        batch_size, micro_batch_size, seed, shard: the values in use.

    Raises:
        InvalidValue: a value of an option is not allowed, or the numbers do not fit together.
        RunDirectoryError: the run directory contains another run, is in use, is damaged or cannot be written.

    Example::

        >>> import samestep, torch
        >>> import torch.nn.functional as F
        >>> from torch.utils.data import TensorDataset
        >>> run = samestep.Run("runs/example", batch_size=8, micro_batch_size=4)
        >>> data = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> run.prepare(model=model, optimizer=optimizer)
        >>> for epoch in run.epochs(data, 2):
        ...     for step in epoch:
        ...         for x, y in step:
        ...             step.backward(F.mse_loss(model(x), y))
        ...         optimizer.step()
        ...
        >>> run.steps_done
        8
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        precision: Precision = "fp32",
        shard: Shard | None = None,
        shard_copies: int = 1,
        pipeline: int | None = None,
        workers: int | None = None,
        inner_steps: int | None = None,
        exchange_dtype: ExchangeDtype | None = None,
        num_threads: int = 1,
        snapshot_every: int | str | None = "1epochs",
        keep_last: int = 3,
        resume: str | int | bool | None = "latest",
        max_steps: int | None = None,
        log_every: int | str = 10,
        compare_every: int | str | None = 100,
        check_compute_every: int | str | None = None,
        trackers: Sequence[Tracker | str] | str = (),
        config: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        deterministic: bool = True,
    ) -> None:
        report_errors(find_rank())
        environment = find_ranks()
        if config is not None and not isinstance(config, Mapping):
            raise InvalidType(f"config must be a dict such as vars(args), not a {type(config).__name__}", code="SS102")
        requested, options = read_request(environment.interceptor)
        is_trial = any(kind.is_trial for kind in requested)
        settings = build_config(
            environment,
            is_trial=is_trial,
            **{name: value for name, value in locals().items() if name in OPTIONS},
        )
        self.batch_size = settings.batch_size
        self.micro_batch_size = settings.micro_batch_size
        self.seed = settings.seed
        self.shard = settings.shard
        self.device = choose_device(environment, settings.device, settings.backend)
        fix_kernels(settings.num_threads, settings.deterministic)
        if settings.precision == "tf32" and self.device.type == "cuda":
            use_tf32()
        group = open_group(environment, self.device, backend=settings.backend)
        group.divide(settings.pipeline_ranks or 1)
        self.local_rank = environment.local_rank
        self._progress = Progress(is_shown=group.rank == 0)
        location = Location(settings, group, self._say, keeps=environment.heals)
        self.dir = location.path
        self._context = context = RunContext(
            environment,
            settings,
            group,
            self.device,
            MixedPrecision(settings.precision, self.device),
            self._say,
            location,
            hide_secrets(config or {}),
            RunState(),
        )
        self._state = context.state
        self._services = Services(context, self._progress, Trackers(() if is_trial else settings.trackers, self._say))
        self._interceptors = [kind(context, options) for kind in [*find_kinds(settings), *requested]]
        self._old_params = find_params()
        self._prepared: Prepared | None = None
        self._loop: Loop | None = None
        self._sharded_init = ShardedInit(self.seed)
        self._is_recalled = False  # by `restore`, before the first loop
        seed_all(derive(self.seed, "init"))

    @property
    def rank(self) -> int:
        """This rank's number, as in torch.distributed.

        Example::

            >>> import samestep
            >>> run = samestep.Run(None, batch_size=4)
            >>> run.rank, run.world_size
            (0, 1)
        """
        return self._context.rank

    @property
    def world_size(self) -> int:
        """The number of ranks. It changes when ranks die and the others continue (`--heal`).

        Example: see `Run.rank`.
        """
        return self._context.world_size

    @property
    def state(self) -> dict[str, Any]:
        """JSON dict of the script, part of every snapshot and restored by `prepare`.

        Example::

            >>> import samestep
            >>> run = samestep.Run(None, batch_size=8)
            >>> run.state["best"] = 0.5
            >>> run.state
            {'best': 0.5}
        """
        return self._state.script

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._state.set_script(state)

    @property
    def summary(self) -> dict[str, Any]:
        """Rows that the script adds to the table at the end of a loop.

        Example::

            >>> import samestep
            >>> run = samestep.Run(None, batch_size=8)
            >>> run.summary["accuracy"] = "93 %"
        """
        return self._state.summary

    @property
    def steps_done(self) -> int:
        """Number of steps done so far, over all restarts.

        Example: see `Run`.
        """
        return self._state.steps_done

    def sharded_init(self) -> AbstractContextManager[None]:
        """Context manager in which the script builds a model that is too large for one rank, with `shard="fsdp2"`.

        Parameters that are created inside it are on torch's meta device. `prepare` gives memory to one block after the
        other, and calls `reset_parameters` of each module with a seed of its own. So the values are the same at any
        number of ranks, and with any `shard`. Other initialization inside the block is refused, or has no effect if it
        writes through `.data`. All ranks run the same code there.

        Raises:
            UsageError: called after `prepare`, or (in `prepare`) a module has parameters and no `reset_parameters`, or
                other code has set one.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=8, shard="fsdp2")
            >>> class Linear(torch.nn.Linear):
            ...     def reset_parameters(self):
            ...         torch.nn.init.normal_(self.weight, std=0.02)
            ...         torch.nn.init.zeros_(self.bias)
            ...
            >>> with run.sharded_init():
            ...     model = Linear(3, 1)
            ...
            >>> model.weight.device
            device(type='meta')
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> model.weight.device
            device(type='cpu')
        """
        if self._prepared is not None:
            raise UsageError("run.sharded_init was called after run.prepare: build all models before it", code="SS221")
        return self._sharded_init.building()

    def prepare(
        self,
        *unnamed: Any,
        override: bool = False,
        device_map: Literal["keep"] | None = None,
        shard_blocks: Sequence[type[nn.Module]] | None = None,
        stages: Sequence[str] | None = None,
        inner_optimizer: torch.optim.Optimizer | None = None,
        **objects: Any,
    ) -> None:
        """Register everything that has a state, and restore it from the newest snapshot. Call it once.

        Works in place: modules move to the device and get the values of rank 0. The names become the keys of snapshots.

        Args:
            objects: models, optimizers, learning rate schedulers, averaged models, and all other objects
                with `state_dict` and `load_state_dict`, by name.
            override: in a resumed run, use the script's data and its settings of optimizers and schedulers (`lr`,
                `T_max`) where they differ from the run's. Otherwise, the run keeps its settings and warns, and
                different data are an error.
            device_map: "keep" leaves every parameter on its device. None: move all models to the device of the run.
            shard_blocks: with `shard="fsdp2"`, classes of modules whose parameters are gathered one module at a time.
                None: the modules in each `nn.ModuleList`.
            stages: with `pipeline`, the names of the modules that begin the second and each further stage, such as
                "blocks.2", in the order in which forward calls them.
            inner_optimizer: with `workers`, the optimizer of the inner steps, which the run calls.

        Raises:
            InvalidType, InvalidValue: an object has no state_dict, a model contains SyncBatchNorm, or an optimizer
                holds parameters of no model.
            UsageError: a model was built before the run, or this is the second call.
            RunDirectoryError: the snapshot does not fit the objects.

        Example: see `Run`.
        """
        if unnamed:
            raise UsageError(
                "run.prepare takes everything by name, run.prepare(model=model, ...), and returns nothing", code="SS221"
            )
        if not objects:
            raise UsageError("run.prepare got no objects: call run.prepare(model=..., optimizer=...)", code="SS221")
        if self._prepared is not None:
            raise UsageError("run.prepare was called twice: pass all objects in one call", code="SS221")
        choice(False, True)("override", override)
        choice(None, "keep")("device_map", device_map)
        if not all(isinstance(block, type) and issubclass(block, nn.Module) for block in shard_blocks or ()):
            raise InvalidType(f"shard_blocks lists classes of modules, not {shard_blocks!r}", code="SS102")
        if inner_optimizer is not None:
            objects[INNER] = inner_optimizer
        named = Objects(objects)
        check_objects(named, self._old_params)
        self._prepared = prepared = prepare_objects(
            named,
            self._context,
            self._interceptors,
            self._sharded_init,
            override=override,
            device_map=device_map,
            shard_blocks=shard_blocks,
            stages=stages,
        )
        if not prepared.point.is_beginning:
            self._services.snapshotter.resume(prepared.point.step)
            prepared.replicas.note_restored()

    def epochs(
        self,
        data: Any,
        num_epochs: int,
        *,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        sampler: Sampler | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        pin_memory: bool | None = None,
    ) -> Iterator[Epoch]:
        """Iterate over epochs, from the point where the run resumes. Each uses every sample of `data` exactly once.

        Args:
            data: a map-style data set, a `Source`, or a DataLoader of either, with the run's batch size or micro-batch
                size as its batch size. `collate_fn` gets micro-batches in both cases.
            num_epochs: number of epochs of this loop, including those before a restart. A run may have several loops;
                see docs/loops.md.
            collate_fn, num_workers, pin_memory: as in `torch.utils.data.DataLoader`.
            sampler: function of the epoch number that returns the indices of its samples, the same on all ranks. It is
                called when the epoch begins, with seeded global generators, and may depend on the state of the
                training. All epochs of the loop have the same length.
            shuffle: use a different order in each epoch. Default: True.
            drop_last: leave out the last step of an epoch if it is short. Default: False.

        Raises:
            InvalidType, InvalidValue: the data set cannot be indexed, or an argument does not fit it.
            UsageError: `prepare` was not called, or another loop was left by `break`.
            RunDirectoryError: the data set is not the one that the run began with.

        Example: see `Epoch`.
        """
        whole(1)("num_epochs", num_epochs)
        return self._open_loop(
            data,
            num_epochs,
            endless=False,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            shuffle=shuffle,
            drop_last=drop_last,
            pin_memory=pin_memory,
        ).run_epochs()

    def steps(
        self,
        data: Any,
        num_steps: int,
        *,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        sampler: Sampler | None = None,
        shuffle: bool | None = None,
        pin_memory: bool | None = None,
    ) -> Iterator[Step]:
        """Iterate over steps, from the point where the run resumes. The data set is repeated, and no step is short.

        Args:
            data: as in `epochs`, or an `IterableDataset`, which is read in one lane per micro-batch of a step; see
                docs/streaming.md.
            collate_fn, num_workers, sampler, shuffle, pin_memory: as in `epochs`.
            num_steps: number of steps of this loop, including those before a restart.

        Raises:
            Error: one of its subclasses, as in `epochs`.

        Example: see `Step`.
        """
        whole(1)("num_steps", num_steps)
        return self._open_loop(
            data,
            num_steps,
            endless=True,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            shuffle=shuffle,
            pin_memory=pin_memory,
        ).run_steps()

    def evaluate(
        self,
        score: Callable[[Any], Mapping[str, Any]],
        data: Any,
        *,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        micro_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Score every sample of `data` exactly once, divided among the ranks. Return the same bits on all ranks.

        Args:
            score: function of a micro-batch, called in eval mode without gradients. Returns a dict of name -> value: a
                number or scalar tensor (a mean over the samples), a pair `(value, weight)` (a mean over `weight`
                units), or a list with one entry per sample.
            data: as in `epochs`.
            collate_fn, num_workers: as in `epochs`.
            micro_batch_size: samples per call of `score`. None: the batch size of a DataLoader, else the micro-batch
                size of the run.

        Returns:
            name -> mean as a float, or the list for the whole data set, in the order of the data set.

        Raises:
            UsageError: called inside a loop over micro-batches, or not on all ranks.
            InvalidType, InvalidValue: an argument or a score cannot be used.
            PeerFailed: on the other ranks, if `score` raised another exception on one.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4)
            >>> model = torch.nn.Linear(1, 1)
            >>> run.prepare(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            >>> run.evaluate(lambda x: {"mean": x.mean(), "all": x.flatten().tolist()}, torch.arange(6.0).view(6, 1))
            {'mean': 2.5, 'all': [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
        """
        self._check_call("run.evaluate", "the ranks are not at the same place there; dedent it")
        return Evaluator(self._context, self._check_prepared("run.evaluate"), self._services).evaluate(
            score, data, collate_fn=collate_fn, num_workers=num_workers, micro_batch_size=micro_batch_size
        )

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Write a row to `metrics.jsonl` and to the trackers at the current step. Call it on all ranks.

        Rank 0 writes its values. Rows that a resumed script logs again, before its loop or at the start of an epoch,
        are written once. If the run stops within an epoch, rows after that epoch's steps are not written: a run that is
        trained further logs them at the epoch's end.

        Args:
            values: name -> number, string or tensor; further ones as keyword arguments.

        Raises:
            UsageError: called inside a loop over micro-batches, where each rank knows only its part: use `Step.log`
                there.

        Example::

            >>> import samestep
            >>> run = samestep.Run(None, batch_size=4)
            >>> run.log({"validation/loss": 0.5}, accuracy=0.9)
        """
        self._check_call("run.log", "it knows this rank's part only; call step.log, which averages over all ranks")
        row = collect_values("run.log", values, named)
        loop = self._loop
        has_run = self.steps_done > 0 if loop is None else loop.repeats_head
        will_run_again = loop is not None and loop.is_cut
        if has_run or will_run_again:
            return
        in_body = self._state.newest_step == self.steps_done
        self._services.metrics.write_row(row, self.steps_done + in_body)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only. Arguments as for the builtin `print`.

        Example::

            >>> import samestep
            >>> samestep.Run(None, batch_size=4).print("hello")
            hello
        """
        self._progress.print(*args, **kwargs)

    def once(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on rank 0 only and return its result on every rank.

        All ranks must call it, and wait as long as it takes. If the call depends on something that ranks can see
        differently, such as whether a file exists, check that inside `fn`. The result is pickled. After the call, the
        random number generators of all ranks have the state of rank 0's.

        Raises:
            UsageError: called inside a loop over micro-batches, or another rank made a different call.
            InvalidType: the result cannot be pickled.

        Example::

            >>> import samestep
            >>> samestep.Run(None, batch_size=4).once(sorted, [3, 1, 2])
            [1, 2, 3]
        """
        self._check_call("run.once", "the ranks are not at the same place there; call it before the loop")
        group = self._context.group
        wait_for_call(group, Call.ONCE)
        return call_on_rank_0(group, fn, *args, **kwargs)

    def barrier(self) -> None:
        """Wait until all ranks have called it, for example before they read a file that one of them has written.

        Raises:
            UsageError: called inside a loop over micro-batches, or another rank made a different call.

        Example::

            >>> import samestep
            >>> samestep.Run(None, batch_size=4).barrier()
        """
        self._check_call("run.barrier", "the ranks are not at the same place there; call it before the loop")
        wait_for_call(self._context.group, Call.BARRIER)

    def snapshot(self, name: str) -> None:
        """Save a named snapshot at the end of the loop's current body. Call it on all ranks.

        Args:
            name: letters, digits and underscores. An older snapshot of this name is replaced.

        Raises:
            InvalidValue: the name cannot be used.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run("runs/best", batch_size=4)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(10, 1), 5):
            ...     for x in step:
            ...         step.backward(model(x).mean())
            ...     optimizer.step()
            ...     if step.number == 2:
            ...         run.snapshot("best")
            ...
            >>> weight = model.weight.item()
            >>> run.restore("best")
            >>> model.weight.item() > weight
            True
        """
        self._check_left()
        self._services.snapshotter.ask_for(name, is_taken=self._state.loop.is_past)

    def restore(self, which: int | str) -> None:
        """Load the weights and buffers of a snapshot into the models, in place. Call it after the loop, on all ranks.

        Optimizers, schedulers and the position of the run stay as they are; see docs/resuming.md.

        Args:
            which: name of a snapshot such as "best", a step, or "latest".

        Raises:
            RunDirectoryError: there is no such snapshot, or its state does not fit a model.
            UsageError: the run has no directory, or the call is inside a loop. The run's first loop raises this, if it
                begins after the call.

        Example: see `Run.snapshot`.
        """
        self._check_call("run.restore", "call it after the loop")
        prepared = self._check_prepared("run.restore")
        if self._state.is_in_loop:
            raise UsageError(
                "run.restore in the loop would change what is trained: call it after the loop", code="SS221"
            )
        context = self._context
        wait_for_call(context.group, Call.RESTORE)
        self._services.snapshotter.wait_until_written()
        prepared.gradients.free_gathered()
        is_loaded = restore_models(
            context.location,
            prepared.objects.modules,
            which,
            may_lack=any(each.is_trial for each in self._interceptors),
        )
        self._is_recalled = is_loaded and self._loop is None

    def stop(self, reason: str = "") -> None:
        """End the loop after the current step (or the current epoch's body). Call it on all ranks.

        Base the decision on values that are the same on all ranks (`Step.metrics`, the result of `evaluate`). A later
        start makes no further step in this loop, unless it resumes from a step by number.

        Args:
            reason: shown at the end of the run.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(10, 1), 100):
            ...     for x in step:
            ...         step.backward(model(x).square().mean())
            ...     optimizer.step()
            ...     if step.metrics["loss"] < 100:
            ...         run.stop("good enough")
            ...
            >>> run.steps_done
            1
        """
        self._check_left()
        self._state.stop(reason or "run.stop()")

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for the forward pass and the loss, in the precision of the run. See `torch.autocast`.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4, precision="bf16", device="cpu")
            >>> with run.autocast():
            ...     print(torch.nn.Linear(1, 1)(torch.ones(1, 1)).dtype)
            torch.bfloat16
        """
        return self._context.precision.autocast()

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the gradient of the whole batch after the loop over micro-batches. See `torch.nn.utils.clip_grad_norm_`.

        Args: as in torch. The order of the parameters does not matter.

        Returns:
            The norm before clipping, a scalar tensor.

        Raises:
            UsageError: called inside the loop over micro-batches, where the gradient is not complete.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(10, 1), 1):
            ...     for x in step:
            ...         step.backward(model(x).mean())
            ...     norm = run.clip_grad_norm_(model.parameters(), max_norm=1.0)
            ...     optimizer.step()
            ...
            >>> round(norm.item(), 3)
            1.414
        """
        self._refuse_in_step("run.clip_grad_norm_", "the gradient is not complete there; dedent it")
        prepared = self._check_prepared("run.clip_grad_norm_")
        params = prepared.sort([parameters] if isinstance(parameters, Tensor) else parameters)
        if not prepared.gradients.plan.is_divided:
            return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
        norm = compute_total_norm(params, norm_type, self._context.group, prepared.gradients.ownership)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, and error_if_nonfinite is set")
        clip_with_norm(params, max_norm, norm)
        return norm

    def _open_loop(self, data: Any, count: int, **arguments: Any) -> Loop:
        """Open the next loop, of `count` epochs or steps. Other arguments as for `open_loop_data`."""
        self._check_left()
        start = (0, 0) if self._loop is None else self._loop.find_end()
        prepared = self._check_prepared("the loop")
        if self._is_recalled:
            raise UsageError(
                "run.restore was called before the loop, which would train other weights: call it after it",
                code="SS221",
            )
        start, num_done = self._state.find_begin(start)
        opened = open_loop_data(
            data,
            max(count - num_done, 0),
            seed=self.seed,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            start=start,
            epoch_length=self._state.find_epoch_length(),
            **arguments,
        )
        self._loop = open_loop(opened, self._context, prepared, self._services)
        return self._loop

    def _check_call(self, what: str, instead: str) -> None:
        """Refuse a call in the wrong place."""
        self._check_left()
        self._refuse_in_step(what, instead)

    def _refuse_in_step(self, what: str, instead: str) -> None:
        if self._loop is not None and self._loop.step is not None:
            self._loop.step.refuse_inside(what, instead)

    def _check_prepared(self, what: str) -> Prepared:
        if self._prepared is None:
            raise UsageError(
                f"call run.prepare(model=..., optimizer=...) before {what}: it makes all ranks alike", code="SS221"
            )
        return self._prepared

    def _check_left(self) -> None:
        if self._loop is not None:
            self._loop.check_not_left()

    def _say(self, sentence: str) -> None:
        """Print a sentence. The context has this method, so a loop that the script keeps also keeps the run open."""
        self._progress.say(sentence)

    def __del__(self) -> None:
        if hasattr(self, "_services"):  # false if `__init__` has failed
            self._services.drop()
