"""Small wrong edits of the source, as data. `make mutants` shows that the simulation finds each; see mutants.py.

The text of an edit is in the file exactly once, and short, so that it survives other changes of the file;
`test_simulation.py` checks this.
"""

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "samestep"


@dataclass(frozen=True)
class Planted:
    """A wrong edit.

    Attributes:
        what: what is wrong.
        file: below src/samestep.
        old, new: the text, and what replaces it.
        focus: of the scenarios that are tried first, see `scenarios.plan`.
        script: of these scenarios; "" for any.
        scenario: that is tried before, also with its faults a few points earlier or later; "" for none.
        test: the file of tests/ that finds it; "" for the simulation.
    """

    what: str
    file: str
    old: str
    new: str
    focus: str = ""
    script: str = ""
    scenario: str = ""
    test: str = ""

    @property
    def module(self) -> str:
        """The name of the module."""
        return f"samestep.{self.file.removesuffix('.py').replace('/', '.')}"


def _heal(what: str, file: str, old: str, new: str, **more: str) -> Planted:
    return Planted(f"healing: {what}", file, old, new, focus="heal", **more)


def _twins(what: str, file: str, old: str, new: str, **more: str) -> Planted:
    """With a divided state, which has two owners."""
    return Planted(f"twins: {what}", file, old, new, focus="twins", **more)


def _pipelines(what: str, file: str, old: str, new: str, **more: str) -> Planted:
    """With several pipelines."""
    return Planted(f"pipelines: {what}", file, old, new, focus="pipelines", **more)


PLANTED = (
    # --- samples, seeds and the tree
    Planted(
        "two additions of the tree are swapped", "engine/routes.py",
        "    for dst, src in layout.additions:\n", "    for dst, src in layout.additions[::-1]:\n",
    ),
    Planted(
        "a rank adds its parts in another order", "engine/leaf.py",
        "            grads = add_grads(self._sums.pop(), grads)\n        self._sums.append(grads)",
        "            grads = add_grads(self._sums.pop(0), grads)\n        self._sums.append(grads)",
    ),
    Planted(
        "an addition goes to the wrong part", "plan/tree.py",
        "additions.append((dst, _complete(mid, hi, slots, additions)))",
        "additions.append((_complete(mid, hi, slots, additions), dst))",
    ),
    Planted(
        "a rank merges one sum too few with a micro-batch", "plan/tree.py",
        "len(cover(n, first, lo)) + 1 - len(", "len(cover(n, first, lo)) - len(",
    ),
    Planted(
        "the seed of a micro-batch does not depend on the step", "plan/order.py",
        "_pack(seed & _MASK_64, step, pass_, micro_batch | ", "_pack(seed & _MASK_64, 0, pass_, micro_batch | ",
    ),
    Planted(
        "the seed of a micro-batch does not depend on the pass", "plan/order.py",
        "_pack(seed & _MASK_64, step, pass_, micro_batch | ", "_pack(seed & _MASK_64, step, 0, micro_batch | ",
    ),
    Planted(
        "Python's generator is not seeded", "data/loader.py",
        "    _seed_python(seed)\n", "    pass\n",
    ),
    Planted(
        "NumPy's generator is not seeded", "data/loader.py",
        "    np.random.seed(seed >> 31)\n", "    pass\n",
    ),
    Planted(
        "torch's generator is not seeded", "data/loader.py",
        "    torch.default_generator.manual_seed(seed)\n", "    pass\n",
    ),
    Planted(
        "a rank computes a micro-batch with the seed of another one", "train/step.py",
        'seed_all(parts.derive("compute", step=self.number, pass_=self.num_passes, micro_batch=v))',
        'seed_all(parts.derive("compute", step=self.number, pass_=self.num_passes, micro_batch=0))',
    ),
    Planted(
        "a step takes the samples of the step before it", "plan/loop_plan.py",
        "self.micro_batches(step)[v]", "self.micro_batches(max(step - 1, 0))[v]",
    ),
    Planted(
        "the order of an epoch does not depend on the epoch", "plan/order.py",
        'return _shuffle(length, derive(seed, "order", step=epoch))', 'return _shuffle(length, derive(seed, "order"))',
    ),
    Planted(
        "the last, short step of an epoch takes samples of the next epoch", "plan/loop_plan.py",
        "return start, min(start + self.batch_size, (epoch + 1) * self._num_samples)",
        "return start, start + self.batch_size",
    ),
    # --- gradients, losses and buffers
    Planted(
        "the mean of the losses is not weighted", "engine/control.py",
        "math.fsum(weighted) / total", "math.fsum(weighted) / len(weighted)",
    ),
    Planted(
        "the total weight is that of one rank", "engine/control.py",
        "in enumerate(reports):", "in enumerate(reports[: len(layout.ranges[0])]):",
    ),
    Planted(
        "a total over the batch is that of one rank", "train/step.py",
        "return math.fsum(self.gather(numbers))", "return math.fsum(numbers.values())", script="batchnorm",
    ),
    Planted(
        "the gradient is divided by the size of a whole batch", "engine/passes.py",
        "self._scale / reduced.total_weight",
        "self._scale / (gradients.micro_batch_size * self._layout.num_micro_batches)",
    ),
    Planted(
        "a buffer is divided by the number of all micro-batches of one rank", "engine/buffers.py",
        "[counts[k] for k in sums_of_several])", "[counts[k] - 1 for k in sums_of_several])",
    ),
    Planted(
        "a micro-batch begins with the buffers that the one before it has left", "engine/buffers.py",
        "        _copy([self._tensors[k] for k in changed], [self._starts[k] for k in changed])\n", "",
    ),
    Planted(
        "the fingerprints of the last rank are dropped", "train/step.py",
        "map(read_fingerprint, reduced.reports)", "map(read_fingerprint, reduced.reports[:-1])",
    ),
    Planted(
        "a rank ignores the votes of the others", "engine/passes.py",
        "Reduced(votes, reports,", "Reduced([vote], reports,", focus="stop",
    ),
    Planted(
        "the ranks stop only if the first one has got a signal", "train/stopping.py",
        "Decision(max(signals),", "Decision(signals[0],", focus="stop",
    ),
    # --- evaluations
    Planted(
        "an evaluation has the scores of the first rank only", "train/evaluate.py",
        "_merge(layout.sort(rows[group.last_ranks]))", "_merge(rows[0])",
    ),
    Planted(
        "an evaluation trains dropout", "train/evaluate.py",
        '                    _set("training", evaluating)', '                    _set("training", modes)',
    ),
    Planted(
        "an evaluation leaves the modules in another mode", "train/evaluate.py",
        '            _set("training", modes)\n            _set("grad", gradients)',
        '            _set("grad", gradients)',
    ),
    # --- files
    Planted(
        "the tensors of a snapshot are not synced", "snapshot/serialization.py",
        "os.fsync(file.fileno())", "pass", focus="power",
    ),
    Planted(
        "the manifest is not synced", "snapshot/store.py",
        "os.fsync(file.fileno())", "pass", focus="power",
    ),
    Planted(
        "the names in a new snapshot are not synced", "snapshot/store.py",
        "        _sync(directory)\n", "", focus="power",
    ),
    Planted(
        "the name of a new snapshot is not synced", "snapshot/store.py",
        "move_directory(directory, target)\n        _sync(self.path)\n", "move_directory(directory, target)\n",
        focus="power",
    ),
    Planted(
        "the ledger is not synced before a snapshot", "snapshot/logs.py",
        "        os.fsync(self._file)\n\n    def cut", "        pass\n\n    def cut", focus="power",
    ),
    Planted(
        "the name of the directory of snapshots is not synced", "snapshot/store.py",
        "            _sync(self.path.parent)\n", "", focus="power",
        scenario="seed=2 script=gan every=1 steps=5 | 1 power@200 | 1",
    ),
    Planted(
        "a snapshot is visible before its files are complete", "snapshot/store.py",
        'directory = self.path / f"{_WRITING}{name_directory(step, name)}.{secrets.token_hex(4)}"',
        "directory = self.path / name_directory(step, name)", focus="power",
    ),
    Planted(
        "the record of a run is not replaced atomically", "files.py",
        "        os.replace(partial, path)", "        path.unlink(missing_ok=True)\n        os.replace(partial, path)",
        scenario="seed=1 script=mlp every=1 | 1 kill_all@250 | 1 kill_all@os.rename#1 | 2",
    ),
    Planted(
        "the newest snapshots are pruned, and not the oldest", "snapshot/manifest.py",
        "if each.step < oldest_kept", "if each.step > oldest_kept",
    ),
    Planted(
        "the checksum of a manifest is not compared", "snapshot/manifest.py",
        'if manifest.pop("sha256", None) != _checksum(manifest):', 'if not manifest.pop("sha256", None):',
        test="snapshot/test_store.py",
    ),
    Planted(
        "the checksums of a snapshot's bytes are not compared", "snapshot/manifest.py",
        "None if checksum == sha256", "None if checksum", focus="flip",
    ),
    Planted(
        "a short write of a log is taken for a whole one", "snapshot/logs.py",
        "del self._pending[:num_written]", "self._pending.clear()",
    ),
    Planted(
        "a snapshot does not wait until the ranks have decided", "snapshot/snapshotter.py",
        "while not self._decided.wait(_POLL_S):", "while False:", focus="background",
    ),
    # --- resuming
    Planted(
        "a row of the ledger is doubled after a resume", "snapshot/run_directory.py",
        "step * LEDGER_RECORD.size)", "(step + (step > 0)) * LEDGER_RECORD.size)",
    ),
    Planted(
        "the metrics are not cut on a resume", "snapshot/run_directory.py",
        "(metrics, point.metrics_bytes)", "(metrics, metrics.flush())",
    ),
    Planted(
        "a row of an epoch that will run again is written", "train/loop.py",
        "self.is_cut = self._state.steps_done < end", "pass",
    ),
    Planted(
        "a snapshot does not know all rows of its step", "snapshot/run_directory.py",
        '"metrics_bytes": metrics.flush()', '"metrics_bytes": max(0, metrics.flush() - 1)',
    ),
    Planted(
        "run.state is not restored", "train/prepared.py",
        'return contents["state"]', "return {}", focus="kill_all",
    ),
    Planted(
        "the state of an optimizer is not restored", "train/objects.py",
        "        optimizer.load_state_dict({**saved, STATE: states, GROUPS: groups})\n", "",
    ),
    Planted(
        "the sums of the metrics of an epoch are not restored", "train/context.py",
        'self.tally.load_state_dict(notes.get("tally", {}))', "pass", focus="kill_all",
    ),
    Planted(
        "a resumed run begins one step late", "train/context.py",
        'data.plan.first_step, self._resumed["step"])',
        'data.plan.first_step, self._resumed["step"] + (self._resumed["step"] % 5 == 3))',
    ),
    Planted(
        "a run continues from the copy with the oldest snapshot", "snapshot/run_record.py",
        "steps.index(max(steps))", "steps.index(min(steps))", test="snapshot/test_store.py",
    ),
    Planted(
        "the state of an optimizer has the dtype of its weights after a resume", "train/objects.py",
        "optimizer.state[param] = tree_map(", "tree_map(", test="promises/test_resume.py",
    ),
    Planted(
        "the body after an epoch is not seeded", "train/loop.py",
        "        seed_all(derive(self._context.config.seed, purpose, step=number))\n", "",
    ),
    Planted(
        "a copy for a snapshot is not joined before the update", "train/stopping.py",
        "        self._snapshotter.join_copy()\n", "", focus="background",
    ),
    # --- signals
    Planted(
        "a second signal does not end plain python", "train/stopping.py",
        "if now_s - self._heard_at_s >= self._same_for_s:", "if False:", test="train/test_stopping.py",
    ),
    Planted(
        "a late signal kills a rank that has saved", "train/stopping.py",
        "        if math.isinf(self._same_for_s):\n", "        if False:\n", test="train/test_stopping.py",
    ),
    Planted(
        "the other ranks are not ended after a failure", "launch/supervisor.py",
        "case State.FAILING if is_due:", "case State.FAILING if False:", test="launch/test_supervisor.py",
    ),
    Planted(
        "the mean of whole numbers in a buffer is cut off", "engine/buffers.py",
        "            round_all(whole)\n", "            pass\n", test="engine/test_buffers.py",
    ),
    Planted(
        "a lane of a stream continues without its seed", "data/lanes.py",
        "        self._seed_for(lane, step)\n", "", script="stream",
    ),
    # --- several loops, and lines outside of the steps
    Planted(
        "the order of a sampler is not restored", "train/context.py",
        'data.orders.restore(order["epoch"], order["indices"])', "pass", "kill_all", "phases",
    ),
    Planted(
        "a resumed run begins its first loop again", "train/context.py",
        "self._num_past = len(self._ends)", "self._num_past = 0", "kill_all", "phases",
    ),
    Planted(
        "run.stop ends the next loop, too", "train/context.py",
        '            self.stop_reason = ""\n            self._ends', "            self._ends", "kill_all", "phases",
    ),
    Planted(
        "a loop that run.stop has ended continues after a resume", "train/context.py",
        'self.stop_reason if self.is_stopped else ""', '""', "kill_all", "phases",
    ),
    Planted(
        "a parameter that was unfrozen in the loop is frozen after a resume", "train/prepared.py",
        'param.requires_grad_(name not in position["frozen"])', "pass", "kill_all", "phases",
    ),
    Planted(
        "a parameter group that was added in the loop is lost", "train/objects.py",
        'optimizer.add_param_group({"params": added})', "pass", "kill_all", "phases",
    ),
    Planted(
        "what the lines between two loops have changed is changed again", "train/opening.py",
        "state.set_script(prepared.restore_again(context))", "pass", "kill_all", "phases",
    ),
    Planted(
        "the lines after a loop are not seeded", "train/loop.py",
        '        self._seed_body("after", state.steps_done)\n', "", "kill_all", "phases",
    ),
    Planted(
        "a row that was logged before a restart is written again", "train/run.py",
        "if has_run or will_run_again:", "if will_run_again:", "kill_all", "phases",
    ),
    Planted(
        "a rank keeps its own random numbers when rank 0 has drawn alone", "train/determinism.py",
        "    _set_states(states)\n    return value", "    return value", "", "phases",
    ),
    # --- healing
    _heal(
        "an exception is taken for a death", "launch/supervisor.py",
        " and all(failure.is_death for failure in failed)", "", test="launch/test_supervisor.py",
    ),
    _heal(
        "ranks that save after a signal do not continue", "launch/supervisor.py",
        "if self._heals:\n            self._heal()",
        "if self._heals and self.state is not State.SAVING:\n            self._heal()",
        test="launch/test_supervisor.py",
    ),
    _heal(
        "a collective that counts is repeated", "world/membership.py",
        "return position < max(positions)", "return False",
        scenario="seed=84 script=passes every=3 steps=10 | 4 heal kill@1973 kill@2036 | 2",
    ),
    _heal(
        "a collective that does not count is not repeated", "world/membership.py",
        "return position < max(positions)", "return True",
        scenario="seed=1 script=mlp every=3 steps=10 | 3 heal kill@1244 | 1",
    ),
    _heal(
        "nobody confirms a collective", "world/group.py",
        "        self._gather_number_now(1)\n        membership.complete()", "        membership.complete()",
        scenario="seed=46 script=mlp every=3 steps=10 | 5 heal kill@2203 | 2",
    ),
    _heal(
        "a rank keeps the members of the group before", "world/membership.py",
        "        self.members = members\n", "",
    ),
    _heal(
        "the new rank 0 does not complete the ledger", "snapshot/logs.py",
        '        ledger.append(b"".join(missing))\n', "",
        scenario="seed=1 script=mlp every=10 steps=10 | 3 heal kill@730/0 | 1",
    ),
    _heal(
        "the new rank 0 does not complete the metrics", "snapshot/logs.py",
        "for step, line in self._rows if step >= at", "for step, line in self._rows if step > at + 99",
    ),
    _heal(
        "a further pass has the numbers of an earlier one by position", "train/step.py",
        "elif num_ranks != self._num_ranks_before:", "elif False:", script="passes",
    ),
    _heal(
        "a batch that the script has changed in place is used again", "train/step.py",
        "            self._load_again()\n", "            pass\n", script="passes",
    ),
    _heal(
        "a batch that an earlier pass has changed is taken for a new one", "train/step.py",
        "for v in before if self.num_passes else ():", "for v in ():", script="passes",
        scenario="seed=775 script=passes every=3 steps=7 routes=gather | 3 heal kill@850/1 | 1",
    ),
    _heal(
        "the values of a dead rank are left out", "train/step.py",
        "if len(rows) < self._num_ranks:", "if False:", script="passes",
    ),
    _heal(
        "the micro-batches of a dead rank are not computed", "train/step.py",
        "self._attempt = PassAttempt(", "self._attempt = self._attempt or PassAttempt(",
    ),
    # --- healing with a divided state
    _twins(
        "a new owner does not get the state", "train/divided_state.py",
        "            optimizer.state[param] = state\n", "            pass\n",
        scenario="seed=1 script=mlp shard=optimizer owners=2 every=5 steps=10 | 4 heal kill@900/0 kill@1900/1 | 2",
    ),
    _twins(
        "the second owner drops the gradient", "engine/exchange.py",
        "            if route.space.gets_sum:\n",
        "            if route.space.rank in (route.space.owners or [route.space.rank])[:1]:\n",
    ),
    _twins(
        "the norm lacks the gradients of a dead owner", "engine/ownership.py",
        "if ownership.reports(params[i])}", "if ownership.find(params[i])[:1] == (group.number,)}", script="batchnorm",
    ),
    _twins(
        "after a death, parameters are sent by a rank that has not updated them", "engine/ownership.py",
        "members.index(list_living(owners, members)[0]) for", "owners[0] % len(members) for",
    ),
    _twins(
        "ranks go by the deaths that they have noticed", "train/divided_state.py",
        "self._num_ranks < len(", "len(self._group.members) < len(",
        scenario="seed=7 script=mlp shard=optimizer owners=2 every=5 steps=5 | 3 heal kill@822/1 | 2",
    ),
    _twins(
        "the last record of a dead rank 0, which was not known yet, is lost", "snapshot/run_directory.py",
        "        self.waiting = kept.waiting\n", "",
    ),
    Planted(
        "twins: the checksums of both owners count", "train/metrics.py",
        "partial(max, values)", "partial(sum, values)", focus="twins",
    ),
    _twins(
        "a new owner has no checksum of the last gradient", "train/lost_copies.py",
        "            self._metrics.complete_checksums()", "            ",
        scenario="seed=1 script=mlp shard=optimizer owners=2 every=5 steps=5 | 3 heal kill@795/2 kill@1178/1 | 1",
    ),
    _twins(
        "a rank contributes only what it would store", "train/divided_state.py",
        "if param in states and self.ownership.reports(param)",
        "if self.ownership.find_first(param, self._group.members) == self._group.number",
        scenario="seed=1 script=mlp shard=optimizer owners=2 every=5 steps=5 | 3 heal kill@1782/0 | 1",
    ),
    # --- healing with pipelines
    _pipelines(
        "another rank becomes rank 0 while the one before lives", "world/membership.py",
        "sorted(zip(*at_positions, strict=False))", "zip(*at_positions, strict=False)",
        test="world/test_membership.py",
    ),
    _pipelines(
        "what an interrupted micro-batch has done to BatchNorm stays", "engine/passes.py",
        "        del self._sum\n        self._gradients.buffers.undo()\n", "        del self._sum\n",
        scenario="seed=1 script=staged every=5 steps=5 | 4 heal kill@727/3 kill@743/0 | 1",
    ),
    _pipelines(
        "the gradients of a shared weight are added in place", "pipeline/tied.py",
        "total + grad", "total.add_(grad)",
    ),
    _pipelines(
        "a rank knows what another one sends, and this one does not", "pipeline/runner.py",
        "            self._messages.begin()\n", "",
        scenario="seed=1 script=staged every=5 steps=5 | 4 heal kill@727/2 kill@731/1 | 1",
    ),
    _pipelines(
        "the norm lacks the gradients of a dead rank", "engine/ownership.py",
        "(group.can_heal or ", "(",
        scenario="seed=1 script=staged every=5 steps=5 | 4 heal kill@2181/1 | 1",
    ),
    _pipelines(
        "ranks of other stages write the tensors of a stage", "train/staged_state.py",
        "members[position]", "position",
    ),
)  # fmt: skip
