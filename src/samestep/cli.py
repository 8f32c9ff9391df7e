"""The `samestep` command. Does not import torch, so that `--help` and errors in the arguments are fast."""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.config import OPTIONS, Option, is_url, name_flag
from samestep.console import escape, say
from samestep.errors import Error, explain
from samestep.files import read_text
from samestep.launch.flags import (
    FLAGS,
    TORCHRUN,
    describe_command_flags,
    find_misplaced,
    name_flags,
    name_option,
    reject_option,
    suggest,
    take_flags,
    take_target,
    translate_torchrun,
)
from samestep.recipes import describe_recipes, find_recipes, read_options, read_other_names, show_recipe_help
from samestep.version import __version__
from samestep.world.environment import (
    check_surroundings,
    drop_output,
    fix_hash_seed,
    set_hook,
)

if TYPE_CHECKING:
    from samestep.launch.local_ranks import Target

HELP = """\
samestep trains a PyTorch model on one CPU, one GPU or a cluster, and gives the same run on each:
the same samples, the same updates, the same bits, at any number of ranks and through any crash.

Commands:
  samestep train [RECIPE]       train one of the included recipes (default: digits)
  samestep launch SCRIPT ...    start your script on several ranks, on this machine or on several machines
  samestep submit SCRIPT ...    submit your script to Slurm
  samestep inspect RUN          show the content of a run directory: settings, snapshots, restarts, samples, digest
  samestep runs [DIR]           list the runs in a directory, sorted by any metric
  samestep report RUN ...       write an HTML page about one or several runs: metrics, time, restarts, configuration
  samestep watch RUN            show the live state of every rank of a running job
  samestep replay RUN SCRIPT .. compute a step of a run again, compare its bits, examine one micro-batch, debug it
  samestep diff RUN RUN         show the first step in which two runs differ, and what differs between them
  samestep bisect GOOD BAD SC.. find the git commit at which the bits or a metric of a script changed
  samestep verify SCRIPT ...    check that a script gives the same run on 1 to 4 ranks and after kills
  samestep scale SCRIPT ...     measure how a script scales with the number of ranks
  samestep plan FILE            choose a batch size and number of ranks for a budget, from samestep scale --json
  samestep doctor               check whether this machine or a cluster is fit for training
  samestep export RUN FILE      write a snapshot's weights to a .safetensors, .pt or .pth file
  samestep prepare text FILE .. turn text into tokens for the recipe gpt
  samestep sample RUN           generate text with a model of the recipe gpt
  samestep translate RUN        translate lines of standard input with a model of the recipe translate

Examples:
  samestep train digits --nproc-per-node 2        a small CNN on real handwritten digits, in seconds
  samestep launch --nproc-per-node 4 train.py --lr 0.1
  samestep inspect runs/digits --digest           a hash of the whole state, equal at any number of ranks

Each command has a --help. `samestep --version` prints the version. `eval "$(samestep completion bash)"` (or zsh) adds
completion of commands and options to the shell.
"""

TRAIN_HELP = """\
usage: samestep train [RECIPE] [options of launch] [options of the recipe]

Trains a recipe: a training script to read and copy. Options may be given in any order.
`samestep train RECIPE --help` shows the recipe's own options.
"""

LAUNCH_HELP = """\
usage: samestep launch [options] SCRIPT [arguments of the script]
       samestep launch [options] -m MODULE [arguments of the module]

Starts the script on several ranks of this machine and waits for them. Everything after the script is an argument of the
script. Options of launch after the script cause a warning, unless the script mentions them or -- precedes the script.
torchrun's --standalone, --rdzv-backend c10d, --master-addr and --master-port are accepted.
Ranks get the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...); the script does not have to use samestep.
The output of every rank is in logs/ in the run directory, whether it is shown or not.

Several machines: give the same command on each, with --nnodes 2 --rdzv-endpoint HOST:29400, where HOST is one of them.
All need the same secret: SAMESTEP_RDZV_SECRET=`openssl rand -hex 32`, or a file (--rdzv-secret).
With --nnodes 1:4, machines may join and leave while the run continues; a signal to one launcher (other than HOST's)
removes its machine. Machines that do not share the run directory each keep a copy.
--hosts a,b:4 starts the machines from here over ssh. Each needs the same working directory and Python. They get these
environment variables of yours, but no keys or tokens: PYTHONPATH, VIRTUAL_ENV, PYTHONHASHSEED, OMP_NUM_THREADS,
MKL_NUM_THREADS, CUBLAS_WORKSPACE_CONFIG, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_DEBUG,
SAMESTEP_*.

The first Ctrl-C, SIGTERM or SIGUSR1 stops the run: it completes the current step, saves and exits. The second one kills
the ranks. With --max-restarts, all ranks restart from the newest snapshot after a rank has died.
Exit code: 0 if the run is complete; the exit code of the rank that failed first (128 + signal if a signal killed it);
130 after Ctrl-C; 75 after SIGTERM or SIGUSR1 if the run has saved (the same command resumes it); 2 after an error in
the input, if the end of the run could not be saved, or if three starts in a row were stopped before they had saved
anything new.
"""

DEFAULT_RECIPE = "digits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Without `arguments`, use the process's arguments, and exit."""
    try:
        if arguments is None:
            if sys.argv[1:2] in (["launch"], ["train"]):
                # Slurm may send SIGUSR1 as soon as a job starts. It stays pending until the launcher handles it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
                fix_hash_seed()
            check_surroundings()
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # such as of `| head`
        drop_output()
        code = 128 + signal.SIGPIPE
    except (Error, OSError) as error:
        if (sentence := explain(error)) is None:
            raise
        print(f"samestep: error: {escape(sentence)}", file=sys.stderr)
        if isinstance(error, OSError):
            drop_output()
        code = Error.exit_code
    except KeyboardInterrupt:
        code = 130
    if arguments is None and "torch" in sys.modules:
        from samestep.launch.rank_process import leave

        leave(code)
    return code


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train, "launch": _launch, "submit": _submit, "verify": _verify, "doctor": _doctor, "watch": _watch,
        "inspect": _inspect, "diff": _diff, "runs": _runs, "report": _report, "replay": _replay,
        "bisect": _bisect, "scale": _scale, "plan": _plan, "export": _export, "prepare": _prepare, "sample": _sample,
        "translate": _translate,
    }  # fmt: skip
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    first, *rest = arguments
    if first == "--version":
        print(f"samestep {__version__}")
        return 0
    if first == "completion":
        from samestep.tools.completion import build_completion

        print(build_completion(commands, rest[0] if rest else "bash"), end="")
        return 0
    if first not in commands:
        kind = "option" if first.startswith("-") else "command"
        known = ["--help", "--version"] if kind == "option" else list(commands)
        raise Error(f"there is no {kind} {first}{suggest(first, known)}")
    return commands[first](rest)


def _start_on_hosts(target: "Target", values: dict[str, Any]) -> int:
    """Start the ranks over ssh on several hosts."""
    from samestep.launch.launcher import check_target
    from samestep.launch.ssh_launcher import parse_hosts, run_hosts

    hosts, endpoint = parse_hosts(values.pop("hosts")), values.pop("rdzv_endpoint", None)
    for name in ("nnodes", "node_rank"):
        if name in values:
            raise Error(f"--hosts sets the number of nodes: leave out {name_flag(name)}")
    if "rdzv_secret" in values:
        raise Error("--hosts creates a secret for each launch: leave out --rdzv-secret")
    check_target(target)
    flags = [name_flag(name) + ("" if value is True else f"={value}") for name, value in values.items()]
    command, program = target.to_command()
    first = [program.pop(0)] if command == "train" else []
    return run_hosts(hosts, command, [*first, *flags], ["--", *program], endpoint)


def _start(target: "Target", values: dict[str, Any]) -> int:
    if "hosts" in values:
        return _start_on_hosts(target, values)
    from samestep.launch.handshake import read_secret
    from samestep.launch.launcher import run_launch
    from samestep.launch.rendezvous_client import parse_nodes

    num_ranks, show_ranks = values.pop("nproc_per_node", "auto"), values.pop("show_ranks", "0")
    max_restarts = values.pop("max_restarts", 0)
    if values.pop("tf_config", False):
        set_hook("samestep.launch.tf_config")
    nodes = parse_nodes(
        values.pop("nnodes", None), values.pop("node_rank", None), values.pop("rdzv_endpoint", None),
        values.pop("rdzv_id", ""), values.pop("rdzv_timeout", 300),
        read_secret(values.pop("rdzv_secret", None)),
    )  # fmt: skip
    if nodes is None:  # else another node may have the snapshot
        _check_resume(**values)
    return run_launch(
        target,
        num_ranks=num_ranks,
        show_ranks=show_ranks,
        max_restarts=max_restarts,
        nodes=nodes,
        overrides=values,
    )


def _check_resume(*, run_dir: str | None = None, resume: str = "latest", fresh: bool = False, **_: Any) -> None:
    """Raise RunDirectoryError if `--run-dir` is a local directory without the snapshot that `--resume` names."""
    which = OPTIONS["resume"].check("--resume", resume)
    if run_dir is None or is_url(run_dir) or fresh or which in (None, "latest"):
        return
    from samestep.snapshot.store import Store

    path = OPTIONS["run_dir"].check("--run-dir", run_dir)
    if path.is_dir() or not path.exists():
        Store(path).check_present(which)


def _launch(arguments: list[str]) -> int:
    values, left = take_flags(arguments, stop_at_first=True, flags=FLAGS | TORCHRUN)
    if left and left[0] in ("-h", "--help"):
        print(f"{LAUNCH_HELP}\n{describe_command_flags()}", end="")
        return 0
    translate_torchrun(values)
    target = take_target("launch", left)
    if arguments[-len(left) - 1 : -len(left)] != ["--"]:
        _warn_of_misplaced(target)
    return _start(target, values)


def _warn_of_misplaced(target: "Target") -> None:
    """Warn about options of `launch` after the script, which are passed to the script."""
    text = "arguments"  # a module can read arguments of any name
    if target.kind == "script":
        with suppress(OSError):
            text = read_text(Path(target.name), is_given=True)
    misplaced = find_misplaced(target.arguments, text)
    if misplaced:
        say(
            f"{' and '.join(misplaced)} after {target.name} goes to the script and not to launch: put options of "
            "launch before the script, or -- before the script if this is intended"
        )


def _take_flags_and_target(
    command: str, arguments: list[str], flags: Mapping[str, Option], default: "Target | None" = None
) -> tuple[dict[str, Any], "Target | None"]:
    """Return the options and the target: a script, -m MODULE, or a recipe, which can be followed by options.

    The target is None if the arguments ask for help.

    Raises:
        Error: there is no target, or an option is invalid.
    """
    values, left = take_flags(arguments, stop_at_first=True, flags=flags)
    if not left and default is not None:
        return values, default
    if not left:
        raise Error(f"{command} needs a script or a recipe; see samestep {command} --help")
    is_recipe = left[0] in find_recipes() and not Path(left[0]).is_file()
    if is_recipe:
        values, left = take_flags(arguments, stop_at_first=False, flags=flags)
    if any(word in ("-h", "--help") for word in (left if is_recipe else left[:1])):
        return values, None
    if is_recipe:
        return values, _build_recipe_target(command, left[0], left[1:], values, flags)
    return values, take_target(command, left, flags)


def _build_recipe_target(
    command: str, recipe: str, arguments: list[str], values: Mapping[str, Any], flags: Mapping[str, Option]
) -> "Target":
    """Return the target that runs a recipe.

    Raises:
        Error: neither the command nor the recipe has an option, or its value is no number where it must be one.
    """
    if "batch_size" in values:
        arguments = [*arguments, f"--batch-size={values['batch_size']}"]  # the recipe derives other numbers from it
    known = {name_option(option): kind for option, kind in read_options(find_recipes()[recipe]).items()}
    if "run_dir" not in flags:  # verify, which names the directories itself
        known.pop("--run-dir", None)
    others = read_other_names(find_recipes()[recipe])
    for place, token in enumerate(arguments):
        name, is_set, _ = token.lstrip("-").replace("-", "_").partition("=")
        if (token.startswith("--") or is_set) and (ours := others.get(name.rpartition(".")[2])):
            raise Error(f"{command} {recipe} has no option {token.partition('=')[0]}: here it is {ours}")
        if token.startswith("--") and name_option(token) not in known:
            raise reject_option(f"{command} {recipe}", token, [*known, *name_flags(flags)])
        if token.startswith("--"):
            option, equals, text = name_option(token), *token.partition("=")[1:]
            arguments[place] = option + equals + text
            if known[option] in (int, float):
                if not equals and place + 1 == len(arguments):
                    raise Error(f"{option} needs a value")
                Option(known[option], "", "").parse(option, text if equals else arguments[place + 1])
    from samestep.launch.local_ranks import Target

    return Target("recipe", f"samestep.recipes.{recipe}", arguments)


def _run_on_target(
    command: str, arguments: list[str], text: str, flags: Mapping[str, Option], run: Callable[..., int],
    words: str = "", default: "Target | None" = None,
) -> int:  # fmt: skip
    """Run a command that takes options, possibly words, and a target. Options may precede and follow the words.

    Args:
        text: the command's help, without the options.
        run: function to call with the words, the target and the values of the options.
        words: names of the words, such as "GOOD BAD".
        default: the target if none is given; None: one must be given.

    Raises:
        Error: a word or the target is missing, or an option is invalid.
    """
    num_words = len(words.split())
    values, left = take_flags(arguments, stop_at_first=True, flags=flags) if words else ({}, arguments)
    found, left = left[:num_words], left[num_words:]
    target = None
    if not {"-h", "--help"} & {*found}:
        if words and not left and default is None:
            raise Error(f"{command} needs {words} and a script or a recipe; see samestep {command} --help")
        more, target = _take_flags_and_target(command, left, flags, default)
        values |= more
    if target is None:
        print(f"{text}\n{describe_command_flags(flags)}", end="")
        return 0
    return run(*found, target, values)


def _submit(arguments: list[str]) -> int:
    from samestep.launch.submit import FLAGS, HELP, run_submit

    return _run_on_target("submit", arguments, HELP, FLAGS, run_submit)


def _train(arguments: list[str]) -> int:
    values, left = take_flags(arguments, stop_at_first=False)
    if "--list" in left:
        print(describe_recipes(), end="")
        return 0
    recipe, left = _take_recipe(left)
    if "-h" in left or "--help" in left:
        if recipe is not None:
            show_recipe_help(recipe)
        print(("" if recipe else f"{TRAIN_HELP}\nRecipes:\n{describe_recipes()}\n") + describe_command_flags(), end="")
        return 0
    return _start(_build_recipe_target("train", recipe or DEFAULT_RECIPE, left, values, FLAGS), values)


def _verify(arguments: list[str]) -> int:
    from samestep.tools.verify.command import FLAGS, HELP, run_verify

    return _run_on_target("verify", arguments, HELP, FLAGS, run_verify)


def _replay(arguments: list[str]) -> int:
    from samestep.tools.replay.run_replay import FLAGS, HELP, RECORDED, run_replay

    return _run_on_target("replay", arguments, HELP, FLAGS, run_replay, "RUN", RECORDED)


def _bisect(arguments: list[str]) -> int:
    from samestep.tools.bisect import FLAGS, HELP, run_bisect

    return _run_on_target("bisect", arguments, HELP, FLAGS, run_bisect, "GOOD BAD")


def _scale(arguments: list[str]) -> int:
    from samestep.tools.scale.run_scale import FLAGS, HELP, run_scale

    return _run_on_target("scale", arguments, HELP, FLAGS, run_scale)


def _plan(arguments: list[str]) -> int:
    from samestep.tools.scale.run_plan import run_plan

    return run_plan(arguments)


def _diff(arguments: list[str]) -> int:
    from samestep.tools.inspect import run_diff

    return run_diff(arguments)


def _doctor(arguments: list[str]) -> int:
    from samestep.tools.doctor.run_doctor import run_doctor

    return run_doctor(arguments, _start)


def _inspect(arguments: list[str]) -> int:
    from samestep.tools.inspect import run_inspect

    return run_inspect(arguments)


def _watch(arguments: list[str]) -> int:
    from samestep.tools.live_view import run_watch

    return run_watch(arguments)


def _runs(arguments: list[str]) -> int:
    from samestep.tools.runs import run_runs

    return run_runs(arguments)


def _report(arguments: list[str]) -> int:
    from samestep.tools.report.run_report import run_report

    return run_report(arguments)


def _export(arguments: list[str]) -> int:
    from samestep.tools.export import run_export

    return run_export(arguments)


def _prepare(arguments: list[str]) -> int:
    from samestep.recipes.commands.prepare import run_prepare

    return run_prepare(arguments)


def _sample(arguments: list[str]) -> int:
    from samestep.recipes.commands.sample import run_sample

    return run_sample(arguments)


def _translate(arguments: list[str]) -> int:
    from samestep.recipes.commands.translation import run_translate

    return run_translate(arguments)


def _take_recipe(left: list[str]) -> tuple[str | None, list[str]]:
    """Return the first argument that names a recipe, and the other arguments."""
    recipes = find_recipes()
    place = next((place for place, token in enumerate(left) if token in recipes), None)
    if place is not None:
        return left[place], left[:place] + left[place + 1 :]
    if left and not left[0].startswith("-"):
        raise Error(f"there is no recipe {left[0]}{suggest(left[0], recipes)}")
    return None, left
