"""One training run: composes the ranks, the data, the gradient, snapshots and metrics into the API of a script."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from samestep.config import CheckCompute, Precision, Reduction
from samestep.console import warn
from samestep.data.loader import seed_all
from samestep.data.order_files import keep_shards
from samestep.data.pools import Pools
from samestep.engine.gradient_averager import GradientAverager
from samestep.engine.precision import build_precision
from samestep.errors import Error, InvalidValue, UsageError
from samestep.plan.schedule import describe_division
from samestep.plan.seeds import derive
from samestep.redaction import hide_secrets
from samestep.snapshot.open_location import open_location
from samestep.snapshot.resume_point import ResumePoint
from samestep.snapshot.serialization import encode
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train.arguments import build_config, check_count, check_script_config
from samestep.train.context import RunContext
from samestep.train.description import describe_run, describe_script, read_commit
from samestep.train.determinism import describe_machine, fix_compiler, fix_kernels, use_tf32
from samestep.train.ending.shutdown import Resources, report_errors
from samestep.train.ending.stop_signals import StopSignals
from samestep.train.ending.stopping import Stopping
from samestep.train.generators import call_on_rank_0
from samestep.train.guards import calls
from samestep.train.guards.misuse import MisuseChecks
from samestep.train.guards.parameters import TrainedParameters
from samestep.train.guards.replicas import Replicas
from samestep.train.guards.unprepared import Unprepared
from samestep.train.guards.watchdog import Watchdog, meet_for_run
from samestep.train.inputs.loop_data import LoopData, open_loop_data
from samestep.train.inputs.sampler_orders import Sampler
from samestep.train.inputs.samples import add_samples, check_marks
from samestep.train.loops.evaluate import Evaluator
from samestep.train.loops.loop import Epoch, Loop
from samestep.train.loops.run_metrics import RunMetrics
from samestep.train.state import stateful as prepared
from samestep.train.state.position import Position
from samestep.train.state.restoring import Contents, restore_models
from samestep.train.step.interception import Interceptors, LoopParts, find_requests, read_request
from samestep.train.step.step_log import collect_values
from samestep.train.step.steps import Observers, Step, StepObserver
from samestep.watch.progress import build_progress, say_above
from samestep.watch.trackers.delivery import Trackers
from samestep.watch.trackers.protocol import Tracker
from samestep.watch.trackers.registry import build_trackers
from samestep.world.announcements import open_announcements
from samestep.world.environment import advise
from samestep.world.group import choose_device, find_rank, find_ranks, open_group

T = TypeVar("T")


class Run:
    """One training run, from its first step to its last, over all restarts.

    The run seeds all generators, so create it before the model and before random data. The options are listed in
    docs/options.md; one that is set on the command line (`samestep launch --batch-size 64`) or in the environment
    (`SAMESTEP_BATCH_SIZE=64`) replaces the argument. docs/training.md is a guide.

    Args:
        run_dir: run directory, a path or a URL for fsspec. None: write nothing and resume nothing (notebooks).
        batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: samples per forward and backward pass, which is what BatchNorm sees. The number of ranks is
            at most `batch_size / micro_batch_size`. None: 8, 4 or 2 micro-batches per step if that leaves at least 64
            samples in each, else 1.
        seed: seed of everything random.
        precision: "fp32", "bf16" or "fp16", used by `autocast`; "tf32" is float32 with matrix products and
            convolutions in TF32 on a GPU, and fp32 on the CPU.
        reduction: "exact" (the same bits at any number of ranks) or "fast" (the backend's all-reduce).
        num_threads: CPU threads per rank. The bits depend on it, so the default is 1 on every machine.
        snapshot_every: interval of snapshots: 10 (steps), "2epochs", "30min" (s, min, h) or None. A snapshot is also
            taken at the end of the run, and when it is stopped.
        keep_last: how many numbered snapshots to keep. Named snapshots are always kept.
        resume: "latest", a step, the name of a snapshot such as "best", or False.
        max_steps: total number of steps after which the run ends.
        log_every: interval of the rows in `metrics.jsonl`: 10 (steps), "1epochs" or "30s".
        compare_every: interval of replica checks, which compare parameters and optimizer state of all ranks: 100
            (steps), "1epochs", "30min" or None. Unless it is None, they are also compared before each snapshot.
        check_compute_every: number of steps between checks for faulty processors, in which a micro-batch of each rank
            is computed by another rank, too, and the bits of losses and gradients are compared; see docs/running.md.
            None: no checks.
        check_compute: what to do if these bits differ: "stop" (end the run before that step is applied) or "warn".
        trackers: destinations of metrics: trackers such as `samestep.TensorBoard()`, and names such as "wandb".
        config: recorded in the run directory. A later start with another config warns. Texts under names such as
            `api_key` and `password` are recorded as "(hidden)".
        device: "cpu", "cuda" (one GPU per local rank) or one GPU such as "cuda:1". None: CUDA if there is a GPU.
        deterministic: use deterministic kernels only. If False, a GPU may give different bits each time.
        bucket_cap_mb: MiB of gradients per message. None: 25 on one host, else 1/16 of all gradients, from 1 to 25.

    Attributes:
        dir: run directory or working copy; None without a directory.
        device, rank, local_rank, world_size: as in torch.distributed.
        batch_size, micro_batch_size, seed: the values in use.
        state: JSON dict of the script, part of every snapshot and restored by `prepare`.
        summary: rows that the script adds to the table at the end of a loop.

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

    def __init__(  # noqa: PLR0915
        self,
        run_dir: str | Path | None,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        precision: Precision = "fp32",
        reduction: Reduction = "exact",
        num_threads: int = 1,
        snapshot_every: int | str | None = "1epochs",
        keep_last: int = 3,
        resume: str | int | bool | None = "latest",
        max_steps: int | None = None,
        log_every: int | str = 10,
        compare_every: int | str | None = 100,
        check_compute_every: int | str | None = None,
        check_compute: CheckCompute = "stop",
        trackers: Sequence[Tracker | str] | str = (),
        config: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        deterministic: bool = True,
        bucket_cap_mb: float | None = None,
    ) -> None:
        report_errors(find_rank())
        environment = find_ranks()
        check_script_config(config)
        requests = read_request(environment.interceptor)
        is_trial = any(request.kind.is_trial for request in requests)
        settings = build_config(
            environment,
            is_trial=is_trial,
            run_dir=run_dir,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            seed=seed,
            precision=precision,
            reduction=reduction,
            num_threads=num_threads,
            snapshot_every=snapshot_every,
            keep_last=keep_last,
            resume=resume,
            max_steps=max_steps,
            log_every=log_every,
            device=device,
            compare_every=compare_every,
            check_compute_every=check_compute_every,
            check_compute=check_compute,
            deterministic=deterministic,
            bucket_cap_mb=bucket_cap_mb,
            trackers=trackers,
        )
        self.batch_size = settings.batch_size
        self.micro_batch_size = settings.micro_batch_size
        self.seed = settings.seed
        self.device = choose_device(environment, settings.device, settings.backend)
        fix_kernels(settings.num_threads, settings.deterministic)
        if settings.precision == "tf32" and self.device.type == "cuda":
            use_tf32()
        precision_of_run = build_precision(settings.precision, self.device)
        if environment.world_size > 1:
            meet_for_run(environment.rank)
        group = open_group(environment, self.device, backend=settings.backend)
        open_announcements(group)
        self.rank = environment.rank
        self.local_rank = environment.local_rank
        self.world_size = environment.world_size
        self.state: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self._progress = build_progress(rank=self.rank, terminal=False if is_trial else None)
        self._config = hide_secrets(config or {})
        if settings.precision == "fp16" and self.device.type == "cpu":
            slow = "fp16 is slower than fp32 on most CPUs: use bf16, which needs no loss scale, or a GPU"
            warn(self._say, slow, start="fp16 is slower")
        if settings.precision == "tf32" and self.device.type == "cpu":
            unused = "tf32 is a format of GPUs: this run computes in fp32, because it is on the CPU"
            warn(self._say, unused, start="tf32 is a format of GPUs")
        used = () if is_trial else settings.trackers
        self._trackers = Trackers(build_trackers(used), self._say)
        self._pools = Pools()
        self._position = Position()
        location = open_location(settings, group, self._say)
        self.dir = location.path
        context = RunContext(environment, settings, group, self.device, precision_of_run, self._say, location)
        self._context = context
        self._snapshotter = Snapshotter(settings, location, self.world_size, self._say)
        self._point = ResumePoint()
        self._signals = StopSignals(environment, self._say, is_on=self.dir is not None)
        self._resources = Resources(context, self._snapshotter, self._signals, self._progress, self._pools)
        self._watchdog = Watchdog(context, self._snapshotter, self._position)
        self._stopping = Stopping(context, self._position, self._snapshotter, self._watchdog, self._signals)
        self._objects: dict[str, Any] = {}
        self._metrics = RunMetrics(context, self._progress, self._trackers, self._objects)
        self._old_params = prepared.find_params()
        self._loop: Loop | None = None
        self._resumed = ""
        self._is_recalled = False
        self._lanes_s: list[float] = []
        self._interceptors = Interceptors(context, [*find_requests(settings), *requests])
        seed_all(derive(self.seed, "init"))

    @property
    def steps_done(self) -> int:
        """Number of steps done so far, over all restarts.

        Example::

            >>> import samestep
            >>> samestep.Run(None, batch_size=8).steps_done
            0
        """
        return self._position.steps_done

    def prepare(
        self, *unnamed: Any, override: bool = False, device_map: Literal["keep"] | None = None, **objects: Any
    ) -> None:
        """Register everything that has a state, and restore it from the newest snapshot. Call it once.

        Works in place: modules move to the device and get the values of rank 0. The names become the keys of snapshots.

        Args:
            objects: models, optimizers, learning rate schedulers, averaged models, and all other objects
                with `state_dict` and `load_state_dict`, by name.
            override: in a resumed run, use the script's data and its settings of optimizers and schedulers (`lr`,
                `T_max`) where they differ from the run's. If False, the run keeps its settings and warns, and different
                data are an error.
            device_map: "keep" leaves every parameter on its device, for models with layers on several devices. None:
                move all models to the device of the run.

        Raises:
            InvalidType, InvalidValue: an object has no state_dict, a model contains SyncBatchNorm, or an optimizer
                holds parameters of no model.
            UsageError: a model was built before the run, or this is the second call.
            RunDirectoryError: the snapshot does not fit the objects.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=8)
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
        """
        if unnamed:
            raise UsageError("run.prepare takes everything by name, run.prepare(model=model, ...), and returns nothing")
        if self._objects:
            raise UsageError("run.prepare was called twice: pass all objects in one call")
        if device_map not in (None, "keep"):
            raise InvalidValue(f'device_map must be "keep" or None, not {device_map!r}')
        context = self._context
        config = self._context.config
        self._modules = modules = prepared.check(objects, self._old_params)
        self._objects.update(objects)
        self._old_params = {}
        self._numbers = config.identity() | {"models": prepared.describe_models(modules)}
        self._overrides = override or config.override
        self._contents = Contents(objects, modules, context.precision, self._say)
        context.group.check_process_group()
        calls.wait_for_call(context.group, calls.PREPARE)
        outline = prepared.outline(objects, modules) | {**self._contents.options.in_force}
        context.group.agree(config.shared() | {"override": self._overrides} | outline)
        if device_map is None:
            for module in modules.values():
                module.to(self.device)
        self._interceptors.prepare(objects, modules)
        context.group.broadcast_tensors([t for m in modules.values() for t in (*m.parameters(), *m.buffers())])
        if self.dir is not None:
            encode(prepared.states(objects))  # an Error for what cannot be saved comes now, not after the first epoch
        self._gradients = GradientAverager(
            modules,
            context.group,
            context.precision,
            exact=config.reduction == "exact",
            bucket_cap_bytes=config.bucket_cap_bytes,
            micro_batch_size=config.micro_batch_size,
        )
        held = prepared.find_held_optimizers(objects)
        self._misuse = MisuseChecks(objects, modules, self._gradients, held)
        self._restore()
        self._replicas = Replicas(objects, context.group, config.compare_every)
        self._parameters = TrainedParameters(objects, modules, self._gradients, held)
        self._evaluator = Evaluator(
            context, modules, self._gradients, self._position, self._watchdog, self._stopping, self._pools
        )

    def epochs(
        self,
        data: Any,
        num_epochs: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
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
                training, such as `run.state`. Epochs may have different lengths.
            shuffle: whether to use a different order in each epoch. Default: True.
            drop_last: whether to leave out the last step of an epoch if it is short. Default: False.

        Raises:
            InvalidType, InvalidValue: the data set cannot be indexed, or an argument does not fit it.
            UsageError: `prepare` was not called, or another loop was left by `break`.
            RunDirectoryError: the data set is not the one that the run began with.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for epoch in run.epochs(torch.ones(10, 1), 1):
            ...     for step in epoch:
            ...         for x in step:
            ...             step.backward(model(x).mean())
            ...         optimizer.step()
            ...
            >>> run.steps_done
            3
        """
        check_count("epochs", num_epochs)
        opened = self._open_data(
            data,
            endless=False,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            shuffle=shuffle,
            drop_last=drop_last,
            pin_memory=pin_memory,
        )
        return self._begin(opened, opened.plan.plan_end(num_epochs), num_epochs).run_epochs(num_epochs)

    def steps(
        self,
        data: Any,
        num_steps: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
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

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4)
            >>> model = torch.nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> run.prepare(model=model, optimizer=optimizer)
            >>> for step in run.steps(torch.ones(10, 1), 7):
            ...     for x in step:
            ...         step.backward(model(x).mean())
            ...     optimizer.step()
            ...
            >>> run.steps_done
            7
        """
        check_count("steps", num_steps)
        opened = self._open_data(
            data,
            endless=True,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            shuffle=shuffle,
            pin_memory=pin_memory,
        )
        return self._begin(opened, opened.plan.plan_end(num_steps), None).run_steps()

    def evaluate(
        self,
        score: Callable[[Any], Mapping[str, Any]],
        data: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        micro_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Score every sample of `data` exactly once, divided over the ranks. Returns the same bits on all ranks.

        Args:
            score: function of a micro-batch, called in eval mode without gradients. Returns a dict of name -> value: a
                number or scalar tensor (a mean over the samples), a pair `(value, weight)` (a mean over `weight`
                units), or a list with one entry per sample.
            data: as in `epochs`.
            collate_fn, num_workers: as in `epochs`.
            micro_batch_size: samples per call of `score`. None: the batch size of the DataLoader if `data` is one, else
                the micro-batch size of the run.

        Returns:
            name -> mean as a float, or the list for the whole data set, in the order of the data set.

        Raises:
            UsageError: called inside a loop over micro-batches, or not on all ranks.
            InvalidType, InvalidValue: an argument or a score cannot be used.

        Example::

            >>> import samestep, torch
            >>> run = samestep.Run(None, batch_size=4)
            >>> model = torch.nn.Linear(1, 1)
            >>> run.prepare(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            >>> run.evaluate(lambda x: {"mean": x.mean(), "all": x.flatten().tolist()}, torch.arange(6.0).view(6, 1))
            {'mean': 2.5, 'all': [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
        """
        self._check_call("run.evaluate", "the ranks are not at the same place there; dedent it")
        self._check_prepared("run.evaluate")
        arguments: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_workers}
        arguments["micro_batch_size"] = micro_batch_size
        return self._interceptors.evaluate(self._evaluator.evaluate, score, data, **arguments)

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Write a row to `metrics.jsonl` and to the trackers at the current step. Call it on all ranks.

        Rank 0 writes its values. A warning names another rank that has logged other names.

        Rows that a resumed script logs again, before its loop or at the start of an epoch, are written once.

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
        self._metrics.note_names(row)
        if self.steps_done if self._loop is None else self._loop.repeats_head:
            return
        step = None if self._loop is None else self._loop.step
        in_body = step is not None and step.number == self.steps_done
        self._metrics.write_row(row, self.steps_done + in_body)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress bar. Arguments as for the builtin `print`.

        Example::

            >>> import samestep
            >>> samestep.Run(None, batch_size=4).print("hello")
            hello
        """
        self._progress.print(*args, **kwargs)

    def once(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on rank 0 only and return its result on every rank.

        All ranks must call it. Do not make the call depend on what ranks can see differently, such as whether a file
        exists: check that inside `fn`. The result is pickled. After the call, the random number generators of all ranks
        have the state of rank 0's.

        Raises:
            UsageError: called inside a loop over micro-batches, or another rank made a different call.
            InvalidType: the result cannot be pickled.

        Example::

            >>> import samestep
            >>> samestep.Run(None, batch_size=4).once(sorted, [3, 1, 2])
            [1, 2, 3]
        """
        self._check_call("run.once", "the ranks are not at the same place there; call it before the loop")
        calls.wait_for_call(self._context.group, calls.ONCE)
        return call_on_rank_0(self._context.group, fn, *args, **kwargs)

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
        self._snapshotter.ask_for(name, is_taken=self._loop is not None and self._loop.place.is_past)

    def restore(self, which: int | str, *names: str) -> None:
        """Load the weights and buffers of a snapshot into the models, in place. Call it after the loop, on all ranks.

        Optimizers, schedulers and the position of the run stay as they are; see docs/resuming.md.

        Args:
            which: name of a snapshot such as "best", a step, or "latest".
            names: names of models in `prepare`; default: all models.

        Raises:
            RunDirectoryError: there is no such snapshot, or its state does not fit a model.
            UsageError: the run has no directory, or the call is inside a loop. A loop that begins after it raises this,
                too.
            InvalidValue: `prepare` got no model of that name.

        Example: see `Run.snapshot`.
        """
        self._check_call("run.restore", "call it after the loop")
        self._check_prepared("run.restore")
        if not self._stopping.is_ended:
            raise UsageError("run.restore in the loop would change what is trained: call it after the loop")
        calls.wait_for_call(self._context.group, calls.RESTORE)
        may_lack = self._interceptors.is_trial
        group = self._context.group
        self._snapshotter.wait_until_written()
        is_loaded = restore_models(self._context.location, self._modules, names, which, group, may_lack=may_lack)
        self._is_recalled = is_loaded and self._loop is None

    def stop(self, reason: str = "") -> None:
        """End the loop after the current step (or the current epoch's body). Call it on all ranks.

        Base the decision on values that are the same on all ranks (`Step.metrics`, the result of `evaluate`). The same
        command started again makes no further step in this loop, unless it resumes from a step by number.

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
        self._stopping.ask(reason or "run.stop()")

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
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradient of the whole batch after the loop over micro-batches. See `torch.nn.utils.clip_grad_norm_`.

        Args: as in torch.

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
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def _open_data(self, data: Any, **arguments: Any) -> LoopData:
        self._check_left()
        start = (0, 0) if self._loop is None else self._loop.find_end()
        self._check_prepared("the loop")
        if self._is_recalled:
            raise UsageError(
                "run.restore was called before the loop, which would train other weights: call it after it"
            )
        return open_loop_data(
            data,
            seed=self.seed,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            start=start,
            **arguments,
        )

    def _begin(self, data: LoopData, planned: int, num_epochs: int | None) -> Loop:  # noqa: PLR0915
        """Do everything between the check of the arguments and the first step of a loop. `planned`: its end."""
        context = self._context
        config = self._context.config
        position = self._position
        location = context.location
        calls.wait_for_call(context.group, calls.LOOP)
        plan = data.plan
        lengths = {f"the number of {plan.unit}s": planned, "the length of the data set": plan.length}
        context.group.agree(data.numbers | lengths)
        if self._loop is None and not position.resumed_step:
            data.open_epochs(0)  # an error for wrong indices comes before anything is written
        directory = location.path if data.shards else None
        marks = []
        if directory is not None:
            marks = context.group.once(lambda: check_marks(data, directory, overrides=self._overrides))
        if self._loop is None:
            machine = describe_machine(config, self.device)
            options = self._contents.options
            own = location.directory
            options = add_samples(options, context.group, own, data, self.seed, machine, self._overrides)
            if self.dir is not None:
                git, script = context.group.once(lambda: (read_commit(), describe_script()))
                options = replace(options, git=git, script=script)
            location.begin(self._point, self._numbers | data.numbers, machine, self._config, options)
            self._about = describe_run(context, self.dir, self._config, machine, options)
            fix_compiler()
        place = position.begin_loop(data, planned, config.max_steps, location, self._say)
        if directory is not None and (
            problem := location.once(lambda: keep_shards(directory, data.shards_hash, data.shards, marks))
        ):
            self._say(problem)
        if data.lanes is not None and not place.is_past and not place.is_further and position.lanes:
            data.lanes.resume(position.lanes, self._lanes_s)
            if warning := data.lanes.describe_catching_up(position.steps_done - plan.first_step):
                self._say(warning)
        if place.is_further:
            self._resources.begin_loop()
        if place.is_replayed:
            self.state = self._contents.restore_again(location.read(self._point))
        self._stopping.begin_loop(place)
        self._metrics.begin_loop(plan, self._gradients)
        observers: list[StepObserver] = [self._misuse, self._parameters, self._watchdog, self._metrics, self._stopping]
        if self.world_size > 1:
            observers.append(self._replicas)
        interceptors = self._interceptors
        can_resume = self.rank == 0 and self.dir is not None
        if can_resume and not place.is_further and not interceptors.is_trial:
            observers.append(Unprepared(self._objects, data, self._say))
        interceptors.begin_loop(LoopParts(data, self._gradients, self._watchdog, self.dir, self._build_state))
        self._loop = loop = Loop(
            context,
            data,
            place,
            position=position,
            gradients=self._gradients,
            snapshotter=self._snapshotter,
            stopping=self._stopping,
            watchdog=self._watchdog,
            metrics=self._metrics,
            observers=Observers([*observers, *interceptors.installed], interceptors),
            replicas=self._replicas,
            build_state=self._build_state,
            on_end=self._end_loop,
        )
        self._resources.find_failure = loop.find_failure
        if place.is_past:
            return loop
        self._misuse.watch()
        if self.rank == 0:
            self._trackers.start(replace(self._about, resumed_step=self.steps_done))
        if not place.is_further:
            size = None if self._resumed else self.micro_batch_size
            self._say(
                describe_division(self.batch_size // self.micro_batch_size, self.world_size, size) + self._resumed
            )
        if self._stopping.ending and self._resumed and not place.is_further:
            why, longer = loop.explain_end()
            self._say(
                f"nothing left to do in this loop: {why}, and the script continues after it; to train it longer, "
                f"{longer}, or begin anew with {advise(fresh=True)}"
            )
        epochs = num_epochs and plan.first_epoch + num_epochs
        self._progress.begin(total_steps=loop.place.last_step, done_steps=self.steps_done, epochs=epochs)
        self._metrics.start_clock()
        return loop

    def _end_loop(self, rows: dict[str, Any], status: str, failure: Error | None) -> None:
        """At the end of a loop, show the table, end the trackers, and release signal handlers and workers."""
        if self.dir is not None:
            rows["written to"] = self._context.location.shown
        self._progress.end(self.summary | rows)
        if self.rank == 0:
            self._trackers.finish(status)
        self._misuse.close()
        self._signals.restore()
        if failure is None:
            self._resources.end_loop()

    def _restore(self) -> None:
        location = self._context.location
        self._point = point = location.find_resume_point(self._context.config.resume, self._numbers)
        if point.meta is None:
            return
        state = location.read(point)
        meta = point.meta
        self._snapshotter.resume(point)
        self._contents.restore(state, meta.get("settings", {}), overrides=self._overrides)
        if self._context.config.resume == "latest":  # a snapshot that is named is meant to be trained further
            self._stopping.reason = meta.get("stopped", "")
        self.state = state["state"]
        self._position.load_state_dict(state["position"])
        self._metrics.tally.load_state_dict(meta.get("tally", {}))
        self._lanes_s = meta.get("lanes_s", [0.0] * len(self._position.lanes))
        ranks = "" if (was := meta["world_size"]) == self.world_size else f" (was {was} rank{'s' if was != 1 else ''})"
        self._resumed = f"; resumed at step {self.steps_done}{ranks}"

    def _build_state(self, position: dict[str, Any]) -> dict[str, Any]:
        return self._contents.build(position | self._position.state_dict(), self.state)

    def _check_call(self, what: str, instead: str) -> None:
        """Refuse a call in the wrong place."""
        self._check_left()
        self._refuse_in_step(what, instead)

    def _refuse_in_step(self, what: str, instead: str) -> None:
        if self._loop is not None and self._loop.step is not None:
            self._loop.step.refuse_inside(what, instead)

    def _check_prepared(self, what: str) -> None:
        if not self._objects:
            raise UsageError(f"call run.prepare(model=..., optimizer=...) before {what}: it makes all ranks alike")

    def _check_left(self) -> None:
        if self._loop is not None:
            self._loop.check_not_left()

    def _say(self, sentence: str) -> None:
        say_above(self._progress, sentence)

    def __del__(self) -> None:
        if hasattr(self, "_resources"):  # false if `__init__` has failed
            self._resources.close()
