"""Describes the likely causes of a difference between two runs, by a table."""

from samestep.tools.verify.traces import Difference, Traced, name_tensor

DRIFTED = ("hold the same model", "a different model than")  # in the error of ranks whose models differ
DRIFT = "a rank changes the model by its own values (its rank, its micro-batches): updates may use the gradient only"
CARRIED = (
    "the script keeps state from one micro-batch to the next (an attribute, a global variable, a generator), of which "
    "each rank computes others, or it reads its rank or the number of ranks (run.rank, os.environ); derive values from "
    "step.number and the samples"
)
SAMPLE = (
    "a sample must depend only on its index and on torch, numpy.random and random, which samestep seeds before each: "
    "not on the rank, and not on earlier reads"
)
SAMPLER = "the steps use different samples: the sampler must depend on the epoch alone, not on the rank"
DRAWS = (
    "the body of {name} draws a different number of random values: it must not depend on rank or earlier micro-batches"
)
INPUT = "the data set, or collate_fn, returned different values for the same samples ({name} of step {step})"

# What differs first -> the likely cause. `{name}` is the tensor or micro-batch, `{step}` the step.
# Between two runs on the same number of ranks:
OF_REPETITION = {
    "samples": SAMPLER,
    "initial": "{name} differs before the first step: build it after samestep.Run(...), which seeds the generators",
    "draws": DRAWS,
    "input": f"{INPUT}: build random data after samestep.Run(...), which seeds the generators, read no clock and no "
    "file that changes, and sort the elements of a set of strings, whose order differs with each PYTHONHASHSEED",
}
UNREPEATABLE = (
    "look for clocks (time.time(), datetime.now()), generators without a seed, the order of a set of strings or hash() "
    "of a string (both differ with each PYTHONHASHSEED: sort, or export PYTHONHASHSEED=0), memory addresses (id(), a "
    "set of objects), files that change, threads that the script starts, and, with deterministic=False, operators that "
    "are not deterministic"
)
# Between two numbers of ranks:
OF_RANKS = {
    "samples": SAMPLER,
    "initial": "{name} differs before the first step: its initial value must not depend on the rank or their number",
    "draws": DRAWS,
    "input": f"{INPUT}: {SAMPLE}",
    "buffer": "{name} is a buffer that depends on the number of ranks: its value must come from the whole step "
    "(step.num_samples, step.loss), not from this rank's micro-batches",
    "losses": f"the same inputs of {{name}} give a different loss: {CARRIED}",
    "gradient": f"the same losses give a different gradient of {{name}}: {CARRIED}",
    "state": f"the same gradients give a different {{name}}: {CARRIED}",
    "value": f"the same gradients give a different {{name}}: {CARRIED}",
    "loss": f"the loss of the step differs: {CARRIED}",
}
# Between a whole state and one that is divided among the ranks:
OF_SHARD = OF_RANKS | {
    "losses": "the same inputs of {name} give a different loss: the forward pass computes from a part of a tensor",
    "initial": "{name} differs before the first step: set initial values before run.prepare, because values that are "
    "drawn for the parts of a tensor depend on its division",
    "gradient": "the same losses give a different gradient of {name}: something changes the sums over the ranks, such "
    "as a mean in place of a sum, or +0.0 in place of the neutral -0.0",
    "fused": "{fused} has fused=True, whose kernel rounds the last elements of a part differently: leave it out",
    "state": "the same gradients give a different {name}: the update computes from the parts of tensors that a rank "
    "holds, such as a norm of its gradients; for clipping, use run.clip_grad_norm_",
}


def explain(one: Traced, other: Traced, difference: Difference, *, is_resumed: bool) -> list[str]:
    """Return the likely causes, the most likely first.

    Args:
        one: the reference run.
        other: the run that differs: on the same number of ranks, on another number, with another shard, or resumed.
    """
    causes = _find_settings(one, other)
    if moved := ", ".join(dict.fromkeys([*one.moved, *other.moved])):
        causes.append(
            f"{moved} draws in the steps, and is not seeded per micro-batch: use the global generators of torch, "
            "numpy.random or random, which samestep seeds before each one"
        )
    if is_resumed:  # uninterrupted runs were equal, otherwise none would have been interrupted
        which = f" (such as {moved})" if moved else ""
        return [
            f"it differs from step {difference.step} on, after a resume at step {other.settings['begin']}: state that "
            f"the script keeps from step to step{which} is in no snapshot; pass it to run.prepare, or use run.state"
        ]
    if causes:
        return causes
    what = difference.what
    table: dict[str, str] = OF_RANKS
    if all(one.settings[name] == other.settings[name] for name in ("world_size", "shard")):
        return [_fill(OF_REPETITION.get(what, UNREPEATABLE), difference, other)]
    is_sharded = other.settings["shard"] not in (None, "none")
    if is_sharded:
        table = OF_SHARD
        what = "fused" if what == "state" and other.settings["fused"] and other.settings["shard"] == "fsdp2" else what
    if what == "state" and difference.tensor in one.settings["buffers"]:
        what = "buffer"
    causes = [_fill(table[what], difference, other)]
    if is_sharded and CARRIED in OF_RANKS[difference.what]:
        causes.append(f"or, if runs with --shard none differ, too: {CARRIED}")
    return causes


def _fill(sentence: str, difference: Difference, other: Traced) -> str:
    fused = ", ".join(other.settings["fused"])
    return sentence.format(name=name_tensor(difference.name), step=difference.step, fused=fused)


def _find_settings(one: Traced, other: Traced) -> list[str]:
    causes = []
    threads = sorted(one.threads | other.threads)
    if threads != [one.settings["num_threads"]]:
        causes.append(
            f"the thread count changed: torch computed with {' and with '.join(map(str, threads))} threads, the run's "
            f"number is {one.settings['num_threads']}: remove torch.set_num_threads "
            "and pass samestep.Run(num_threads=...)"
        )
    if one.settings["reduction"] == "fast" and one.settings["world_size"] != other.settings["world_size"]:
        causes.append("reduction='fast' adds in a different order at each number of ranks: remove it")
    return causes
