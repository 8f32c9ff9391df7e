"""One training run, as a script sees it: the ranks, the data, the gradient, what is kept and what is said."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samestep.config import Precision, Reduction
from samestep.data.loader import seed_all
from samestep.data.pools import Pools
from samestep.engine.gradient_pass import GradientPass
from samestep.engine.precision import build_precision
from samestep.errors import Error
from samestep.plan.schedule import LEAST_SAMPLES, describe
from samestep.plan.seeds import derive
from samestep.snapshot.serialization import encode
from samestep.snapshot.snapshotter import Snapshotter
from samestep.train import stateful as prepared
from samestep.train.arguments import build_config, check_count, check_extras
from samestep.train.batches import Batches, Sampler, build_batches
from samestep.train.context import RunContext
from samestep.train.determinism import describe_machine, fix_compiler, fix_kernels
from samestep.train.evaluate import Evaluator, open_source
from samestep.train.generators import call_on_rank_0
from samestep.train.loop import Epoch, Loop
from samestep.train.misuse import MisuseChecks
from samestep.train.parameters import TrainedParameters
from samestep.train.position import Position, place_loop
from samestep.train.recall import recall
from samestep.train.replicas import Replicas
from samestep.train.restoring import Contents
from samestep.train.run_metrics import RunMetrics
from samestep.train.samples import add_samples
from samestep.train.shutdown import Resources, report_errors
from samestep.train.state_saver import StateSaver
from samestep.train.steps import Observers, Step
from samestep.train.stop_signals import StopSignals
from samestep.train.stopping import Stopping
from samestep.train.tracing import open_tracer
from samestep.train.unprepared import Unprepared
from samestep.train.watchdog import Watchdog
from samestep.watch.progress import build_progress, say_above
from samestep.watch.trackers import Tracker, TrackerInfo, Trackers
from samestep.world.environment import advise, read_environment, read_rank
from samestep.world.group import choose_device, open_group

T = TypeVar("T")


class Run:
    """One training from first step to last, over all its restarts.

    Args:
        run_dir: where it lives, a path or a URL for fsspec; None: nothing on disk, nothing resumed (notebooks).
        batch_size: samples of one optimizer step, over all ranks.
        micro_batch_size: samples of one forward and backward, all that BatchNorm sees. None: 8, 4 or 2 micro-batches
            where each has at least 64 samples, else 1. `batch_size / micro_batch_size` ranks are the most.
        seed: of everything random.
        precision: "fp32", "bf16" or "fp16": what `autocast` opens.
        reduction: "exact" (the same bits at any number of ranks) or "fast" (the backend's all-reduce).
        num_threads: CPU threads per rank. Bits depend on it, so it never follows from the machine.
        snapshot_every: 10 (steps), "2epochs", "30min" (or s, h) or None; those of a run's end and stop come besides.
        keep_last: number of numbered snapshots to keep; named snapshots are always kept.
        resume: "latest", a step, a snapshot's name such as "best", or False.
        max_steps: ends the run after this many steps in all.
        log_every: interval of the rows in `metrics.jsonl`: 10 (steps) or "1epochs".
        compare_every: interval of the checks that all ranks hold the same state: 100 (steps), "1epochs" or None. The
            state is compared before each snapshot, too, unless this is None.
        trackers: see `samestep.TensorBoard`, `samestep.WandB`.
        config: recorded; a change at a restart is warned about.
        device: "cpu", "cuda" or one GPU such as "cuda:1"; None: CUDA if there is one.
        deterministic: lets torch choose deterministic kernels only; without, a GPU may give other bits each time.
        bucket_cap_mb: MiB of gradients that travel together; default: 25 on one host, else a 16th of all, 1 to 25.

    A launcher's options (`samestep launch --batch-size ...`, SAMESTEP_BATCH_SIZE) go before these.

    Attributes:
        dir, device, rank, local_rank, world_size: where this process stands.
        state: a JSON dict of the script's own, part of every snapshot and restored by `prepare`.
        summary: rows of the script's own for the table at the end: set them in the loop, which shows it when it ends.

    Raises:
        Error: numbers that make no run, a directory that holds another run, that is in use or cannot be written.
    """

    _resources: Resources | None = None

    def __init__(
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
        trackers: Sequence[Tracker] = (),
        config: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        deterministic: bool = True,
        bucket_cap_mb: float | None = None,
    ) -> None:
        report_errors(read_rank())
        environment = read_environment()
        check_extras(trackers, config)
        settings = build_config(
            environment, run_dir=run_dir, batch_size=batch_size, micro_batch_size=micro_batch_size, seed=seed,
            precision=precision, reduction=reduction, num_threads=num_threads, snapshot_every=snapshot_every,
            keep_last=keep_last, resume=resume, max_steps=max_steps, log_every=log_every, device=device,
            compare_every=compare_every, deterministic=deterministic, bucket_cap_mb=bucket_cap_mb,
        )  # fmt: skip
        self.batch_size, self.micro_batch_size = settings.batch_size, settings.micro_batch_size
        self.seed = settings.seed
        self.device = choose_device(environment, settings.device)
        fix_kernels(settings.num_threads, settings.deterministic)
        precision_of_run = build_precision(settings.precision, self.device)
        group = open_group(environment, self.device)
        self.rank, self.local_rank, self.world_size = environment.rank, environment.local_rank, environment.world_size
        self.state: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self._progress, self._config = build_progress(rank=self.rank), dict(config or {})
        self._environment = environment
        self._context = context = RunContext(settings, group, self.device, precision_of_run, self._say)
        self._trackers, self._pools, self._position = Trackers(trackers, self._say), Pools(), Position()
        self._snapshotter = Snapshotter(settings, group, self._say)
        self.dir = self._snapshotter.path
        self._signals = None
        if self.dir is not None:
            self._signals = StopSignals(self._say, environment.launcher, environment.error_dir)
        self._resources = Resources(
            context, self._snapshotter, self._signals, self._progress, self._pools, environment.error_dir
        )
        self._watchdog = Watchdog(context, environment, self._snapshotter, self._position)
        self._stopping = Stopping(
            context, self._position, self._snapshotter, self._watchdog, self._signals
        )
        self._objects: dict[str, Any] = {}
        self._metrics = RunMetrics(context, self._snapshotter, self._progress, self._trackers, self._objects)
        self._old_params = prepared.find_params()
        self._loop: Loop | None = None
        self._misuse: MisuseChecks | None = None
        self._resumed, self._is_recalled = "", False
        self._tracer = None
        if environment.trace is not None:
            self._tracer = open_tracer(context, self.dir, environment.trace, self._watchdog)
        seed_all(derive(self.seed, "init"))

    @property
    def steps_done(self) -> int:
        """Steps finished so far, over all restarts."""
        return self._position.steps_done

    def prepare(self, *unnamed: Any, override: bool = False, **objects: Any) -> None:
        """Takes the run's models, optimizers, schedules and whatever else has a state, and restores them. Once.

        In place: modules go to the device and are made alike on all ranks, but stay themselves. The names are the
        snapshot's keys.

        Args:
            override: a resumed run takes the script's settings of optimizers and schedules (`lr`, `T_max`) where they
                differ from those it was begun with, and other data. Without, it keeps its settings and warns.

        Raises:
            Error: something without state_dict, a model built before the run was seeded, SyncBatchNorm, an
                optimizer of parameters in no model, a snapshot that does not fit.
        """
        if unnamed:
            raise Error("run.prepare takes everything by name, run.prepare(model=model, ...), and returns nothing")
        if self._objects:
            raise Error("run.prepare was called twice: pass all objects in one call")
        context, config = self._context, self._context.config
        self._modules = modules = prepared.check(objects, self._old_params)
        self._objects.update(objects)
        self._old_params = {}
        self._numbers = config.identity() | {"models": prepared.describe(modules)}
        self._overrides = override or config.override
        self._contents = Contents(objects, modules, context.precision, self._say)
        outline = prepared.outline(objects, modules) | {**self._contents.options.in_force}
        context.group.agree(config.shared() | {"override": self._overrides} | outline)
        for module in modules.values():
            module.to(self.device)
        if self._tracer is not None:
            self._tracer.prepare(objects, modules)
        context.group.broadcast_tensors([t for m in modules.values() for t in (*m.parameters(), *m.buffers())])
        if self.dir is not None:
            encode(prepared.states(objects))  # an Error for what cannot be saved comes now, not after the first epoch
        self._gradients = GradientPass(
            modules, context.group, context.precision, exact=config.reduction == "exact",
            bucket_cap_bytes=config.bucket_cap_bytes, micro_batch_size=config.micro_batch_size,
        )  # fmt: skip
        self._misuse = MisuseChecks(objects, modules, self._gradients)
        self._restore()
        self._replicas = Replicas(objects, context.group, config.compare_every)
        self._parameters = TrainedParameters(objects, modules, self._gradients)
        self._evaluator = Evaluator(
            context, modules, self._gradients, self._position, self._watchdog, self._pools,
            take_votes=self._stopping.take_votes, cast_vote=self._stopping.cast_vote,
            logs=lambda: self._snapshotter.logs,
        )  # fmt: skip

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
        """The run's epochs, from where it stands: every sample of `data` exactly once in each.

        Args:
            data: a map-style data set, or a DataLoader of one with the run's micro-batch size.
            num_epochs: how many in this loop, those before a restart included. A run may have several: docs/loops.md.
            collate_fn, num_workers, pin_memory: as in torch's DataLoader.
            sampler: `sampler(epoch)` gives that epoch's sample indices, the same on all ranks.
            shuffle: in another order each epoch (the default).
            drop_last: leave out an epoch's last step when it is short.

        Raises:
            Error: no data, or data that cannot be indexed; `run.json` tells of other data; a loop left by break.
        """
        check_count("epochs", num_epochs)
        batches = self._open_batches(
            data, endless=False, sampler=sampler, collate_fn=collate_fn, num_workers=num_workers, shuffle=shuffle,
            drop_last=drop_last, pin_memory=pin_memory,
        )  # fmt: skip
        assert batches.steps_per_epoch is not None
        return self._begin(batches, num_epochs * batches.steps_per_epoch, num_epochs).run_epochs(num_epochs)

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
        """The run's steps, from where it stands, over `data` again and again: no epochs, no short step.

        Args and errors as for `epochs`; `num_steps` counts those of this loop, before a restart too.
        """
        check_count("steps", num_steps)
        batches = self._open_batches(
            data, endless=True, sampler=sampler, collate_fn=collate_fn, num_workers=num_workers, shuffle=shuffle,
            pin_memory=pin_memory,
        )  # fmt: skip
        return self._begin(batches, num_steps, None).run_steps()

    def evaluate(
        self,
        score: Callable[[Any], Mapping[str, Any]],
        data: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        micro_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Scores every sample of `data` exactly once, in order, shared out over the ranks; the same bits on all.

        Args:
            score: called in eval mode without gradients with a micro-batch; returns name -> value: a number or
                scalar tensor (a mean over the samples), `(value, weight)` (a mean over weight), or a list with one
                entry per sample.
            micro_batch_size: None: the DataLoader's where `data` is one, else the run's.

        Returns:
            name -> mean as a float, or the list over the whole data set in its order.
        """
        self._check_call("run.evaluate", "the ranks are not at the same place there; dedent it")
        self._check_prepared("run.evaluate")
        if self._tracer is not None:
            return self._tracer.evaluate(
                self._evaluate, score, data, collate_fn=collate_fn, num_workers=num_workers,
                micro_batch_size=micro_batch_size,
            )  # fmt: skip
        return self._evaluate(score, data, collate_fn, num_workers, micro_batch_size)

    def _evaluate(
        self,
        score: Callable[[Any], Mapping[str, Any]],
        data: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        micro_batch_size: int | None = None,
    ) -> dict[str, Any]:
        self._position.num_evaluations += 1
        source = open_source(data, micro_batch_size, collate_fn=collate_fn, num_workers=num_workers)
        try:
            return self._evaluator.evaluate(score, source)
        finally:
            pass_ = 2**32 + self._position.num_evaluations
            seed_all(derive(self.seed, "after", step=self.steps_done, pass_=pass_))

    def log(self, values: Mapping[str, Any]) -> None:
        """Adds a row to `metrics.jsonl` and to the trackers, at the present step. The same on all ranks.

        What a resumed script logs before its loop, or at the head of an epoch once more, is there, and is left out.
        """
        self._check_call("run.log", "it knows this rank's part only; call step.log, which averages over all ranks")
        if not isinstance(values, Mapping):
            raise Error(f"run.log takes a dict of name -> value, not {values!r}")
        if self.steps_done if self._loop is None else self._loop.repeats_head:
            return
        step = None if self._loop is None else self._loop.step
        in_body = step is not None and step.number == self.steps_done
        self._metrics.write_row(dict(values), self.steps_done + in_body)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """The builtin print, on rank 0 alone, above the progress bar."""
        self._progress.print(*args, **kwargs)

    def once(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls `fn` on rank 0 alone; every rank gets its result (which must pickle), and draws on as rank 0 does."""
        self._check_call("run.once", "the ranks are not at the same place there; call it before the loop")
        return call_on_rank_0(self._context.group, fn, *args, **kwargs)

    def snapshot(self, name: str) -> None:
        """Keeps the run's state under `name`, for good, once the loop's body is done. On all ranks."""
        self._check_left()
        self._snapshotter.ask_for(name, is_taken=self._loop is not None and self._loop.place.is_past)

    def restore(self, which: int | str, *names: str) -> None:
        """Gives models the weights and buffers of a snapshot, in place; all else stays. After the loop, on all ranks.

        Args:
            which, names: a snapshot's name such as "best", a step, or "latest"; and the models' (default: all models).

        Raises:
            Error: there is no such snapshot; the run has no directory; the loop is not over, or begins afterwards.
        """
        self._check_call("run.restore", "call it after the loop")
        self._check_prepared("run.restore")
        self._is_recalled = recall(self._snapshotter, self._modules, names, which, self._context.group, self._loop)

    def stop(self, reason: str = "") -> None:
        """Ends the loop after the present step (or epoch's body). Call it on every rank: decide on what all know.

        The same command again takes no further step in that loop; one that resumes from the step by its number does.
        """
        self._check_left()
        self._stopping.ask(reason or "run.stop()")

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for the forward pass and the loss, in the run's precision."""
        return self._context.precision.autocast()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ on the whole batch's gradient. Returns the norm before.

        Raises:
            Error: inside the micro-batch loop, where the gradient is not complete.
        """
        self._refuse_in_step("run.clip_grad_norm_", "the gradient is not complete there; dedent it")
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def _open_batches(self, data: Any, **arguments: Any) -> Batches:
        self._check_left()
        start = (0, 0) if self._loop is None else self._loop.find_end()
        self._check_prepared("the loop")
        if self._is_recalled:
            raise Error("run.restore was called before the loop, which would train other weights: call it after it")
        return build_batches(data, self.seed, self.batch_size, self.micro_batch_size, start, **arguments)

    def _begin(self, batches: Batches, total_steps: int, num_epochs: int | None) -> Loop:
        """Prepare everything between the check of the arguments and the first step of a loop."""
        context, config = self._context, self._context.config
        position, snapshotter = self._position, self._snapshotter
        assert self._misuse is not None
        assert self._resources is not None
        lengths = {"the number of steps": total_steps, "the length of the data set": len(batches.source)}
        context.group.agree(batches.numbers | lengths)
        if self._loop is None:
            machine = describe_machine(config, self.device)
            options = self._contents.options
            options = add_samples(options, context.group, snapshotter, batches, self.seed, machine, self._overrides)
            snapshotter.record(self._numbers | batches.numbers, machine, self._config, options)
            fix_compiler()
        place = place_loop(position, snapshotter, batches, total_steps, config.max_steps, self._say)
        if place.is_further:
            self._resources.begin_loop()
        if place.is_replayed:
            self.state = self._contents.restore_again(snapshotter.read_again())
        position.enter(place)
        self._stopping.begin_loop(place)
        self._metrics.begin_loop(batches)
        saver = StateSaver(snapshotter, self._objects, self._replicas, self._build_state)
        observers = [self._misuse, self._parameters, self._watchdog, self._metrics, self._stopping]
        if self._tracer is not None:
            self._tracer.begin_loop(batches, place, self._gradients, self._build_state)
            observers.append(self._tracer)
        # One rank looks for unprepared state, in a run that can be resumed.
        looks = self.rank == 0 and self.dir is not None and self._tracer is None and not place.is_further
        roots = {"the data set": batches.source.dataset, "collate_fn": batches.source.collate_fn}
        self._loop = loop = Loop(
            context, batches, place, environment=self._environment, position=position, gradients=self._gradients,
            snapshotter=snapshotter, stopping=self._stopping, watchdog=self._watchdog, metrics=self._metrics,
            observers=Observers([*observers, saver]), saver=saver, on_end=self._end_loop,
            unprepared=Unprepared(self._objects if looks else None, roots, self._say),
        )  # fmt: skip
        self._resources.find_failure = loop.find_failure
        if place.is_past:
            return loop
        self._misuse.watch()
        if self.rank == 0:
            name = "" if self.dir is None else self.dir.name
            self._trackers.start(TrackerInfo(name, self.dir, self._config, resumed_step=self.steps_done))
        if not place.is_further:
            size = LEAST_SAMPLES if self._resumed else self.micro_batch_size  # a run that goes on keeps its own
            self._say(describe(self.batch_size // self.micro_batch_size, self.world_size, size) + self._resumed)
        if self._stopping.ending and self._resumed and not place.is_further:
            self._say(f"nothing left to do: {loop.explain_end()}, or begin anew with {advise(fresh=True)}")
        epochs = num_epochs and batches.first_epoch + num_epochs
        self._progress.begin(total_steps=place.last_step, done_steps=self.steps_done, epochs=epochs)
        return loop

    def _end_loop(self, rows: dict[str, Any], status: str, failure: Error | None) -> None:
        """The loop is over: show the table, end the trackers, give signals and workers back."""
        assert self._misuse is not None
        assert self._resources is not None
        if self.dir is not None:
            rows["written to"] = self._snapshotter.shown
        self._progress.end(self.summary | rows)
        if self.rank == 0:
            self._trackers.finish(status)
        self._misuse.close()
        if self._signals is not None:
            self._signals.restore()
        if failure is None:
            self._resources.end_loop()

    def _restore(self) -> None:
        if (restored := self._snapshotter.read(self._numbers)) is None:
            return
        state, meta = restored
        self._contents.restore(state, meta.get("settings", {}), overrides=self._overrides)
        if self._context.config.resume == "latest":  # a snapshot that is named is meant to be trained further
            self._stopping.reason = meta.get("stopped", "")
        self.state = state["state"]
        self._position.load_state_dict(state["position"])
        self._metrics.tally.load_state_dict(meta.get("tally", {}))
        ranks = "" if (was := meta["world_size"]) == self.world_size else f" (was {was} rank{'s' if was != 1 else ''})"
        self._resumed = f"; resumed at step {self.steps_done}{ranks}"

    def _build_state(self, position: dict[str, Any]) -> dict[str, Any]:
        return self._contents.build(position | self._position.state_dict(), self.state)

    def _check_call(self, what: str, instead: str) -> None:
        """Refuse a call in the wrong place."""
        self._check_left()
        self._refuse_in_step(what, instead)

    def _refuse_in_step(self, what: str, instead: str) -> None:
        if self._misuse is not None:
            self._misuse.refuse_in_step(what, instead)

    def _check_prepared(self, what: str) -> None:
        if not self._objects:
            raise Error(f"call run.prepare(model=..., optimizer=...) before {what}: it makes all ranks alike")

    def _check_left(self) -> None:
        if self._loop is not None:
            self._loop.check_not_left()

    def _say(self, sentence: str) -> None:
        say_above(self._progress, sentence)

    def __del__(self) -> None:
        if self._resources is not None:
            self._resources.close()
