"""The likely cause of a difference between two runs, by what differs first."""

from samestep.tools.verify.traces import Difference, Traced, name_tensor

DRIFTED = ("hold the same model", "a different model than")  # in the error of ranks whose models differ
DRIFT = "a rank changes the model by its own values (its rank, its micro-batches): updates may use the gradient only"
CARRIED = (
    "the script keeps state from one micro-batch to the next (an attribute, a global variable, its own generator), of "
    "which each rank computes others, or it reads its rank or the number of ranks (run.rank, os.environ), or calls "
    "torch.set_num_threads; derive values from step.number and the samples, and draw from the global generators"
)
OR_CARRIED = f"; or, if runs with --shard none differ, too: {CARRIED}"
INPUT = "the data set, or collate_fn, returned different values for the same samples ({name} of step {step})"
EVERYWHERE = {
    "samples": "the steps use different samples: the sampler must depend on the epoch alone, not on the rank",
    "draws": "the body of {name} draws a different number of random values: it must not depend on rank or earlier "
    "micro-batches",
}

# What differs first -> the likely cause. `{name}` is the tensor or micro-batch, `{step}` the step.
# Between two runs on the same number of ranks:
OF_REPETITION = EVERYWHERE | {
    "initial": "{name} differs before the first step: build it after samestep.Run(...), which seeds the generators",
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
OF_RANKS = EVERYWHERE | {
    "initial": "{name} differs before the first step: its initial value must not depend on the rank or their number",
    "input": f"{INPUT}: a sample must depend only on its index and on torch, numpy.random and random, which samestep "
    "seeds before each: not on the rank, and not on earlier reads",
    "losses": f"the same inputs of {{name}} give a different loss: {CARRIED}",
    "gradient": f"the same losses give a different gradient of {{name}}: {CARRIED}",
    "state": f"the same gradients give a different {{name}}: {CARRIED}; a buffer must get its value from the whole "
    "step (step.num_samples, step.loss), not from this rank's micro-batches",
    "value": f"the same gradients give a different {{name}}: {CARRIED}",
    "loss": f"the loss of the step differs: {CARRIED}",
}
# Between a whole state and one that is divided among the ranks:
OF_SHARD = OF_RANKS | {
    "initial": "{name} differs before the first step: set initial values before run.prepare, because values that are "
    "drawn for the parts of a tensor depend on its division",
    "losses": "the same inputs of {name} give a different loss: the forward pass computes from a part of a tensor"
    f"{OR_CARRIED}",
    "gradient": "the same losses give a different gradient of {name}: something changes the sums over the ranks, such "
    f"as a mean in place of a sum, or +0.0 in place of the neutral -0.0{OR_CARRIED}",
    "state": "the same gradients give a different {name}: the update computes from the parts of tensors that a rank "
    "holds, such as a norm of its gradients (for clipping, use run.clip_grad_norm_), or fused=True, whose kernel "
    f"rounds the last elements of a part differently{OR_CARRIED}",
}


def explain(one: Traced, other: Traced, difference: Difference) -> str:
    """Return the likely cause.

    Args:
        one: the reference run.
        other: the run that differs: on the same number of ranks, on another number, with another shard, or resumed.
    """
    if begin := other.settings["begin"]:  # uninterrupted runs were equal, otherwise none would have been interrupted
        return (
            f"it differs from step {difference.step} on, after a resume at step {begin}: state that "
            "the script keeps from step to step, such as a generator of its own, is in no snapshot; pass it to "
            "run.prepare, or use run.state"
        )
    if all(one.settings[name] == other.settings[name] for name in ("world_size", "shard")):
        sentence = OF_REPETITION.get(difference.what, UNREPEATABLE)
    else:
        sentence = (OF_SHARD if other.settings["shard"] else OF_RANKS)[difference.what]
    return sentence.format(name=name_tensor(difference.name), step=difference.step)
