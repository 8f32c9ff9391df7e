"""What ranks run, and the commands that start it: their options, and the words after them."""

import ast
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from samestep.cli import Command, build_options, take_values
from samestep.config import OPTIONS, Option, whole
from samestep.errors import Error
from samestep.files import read_text
from samestep.plan.tree import check_positive

# Of samestep itself. -P: a file in the working directory, such as a run's, must not shadow a module of Python.
COMMAND = (sys.executable, "-P", "-m", "samestep")
MAX_LOCAL_RANKS = 1 << 12  # more than any machine runs, so a larger number is a typing error

FLAGS: dict[str, Option] = {
    "nproc_per_node": Option(int, "N", "ranks per node; default: one per GPU, else 1", whole(1, MAX_LOCAL_RANKS)),
    "show_all": Option(bool, "", "show the output of all ranks, not only of rank 0"),
    "max_restarts": Option(
        int, "N", "how often to restart all ranks from the newest snapshot after one has failed; default: 0", whole(0)
    ),
    "heal": Option(bool, "", "if a rank dies, or a node except node 0, the others continue in the same step"),
    "nnodes": Option(int, "N", "number of machines; default: 1", whole(1)),
    "node_rank": Option(int, "R", "number of this machine: 0 at --rdzv-endpoint"),
    "rdzv_endpoint": Option(str, "H:P", "where the machines meet: the address of node 0 ([v6]) and a free port there"),
    "rdzv_timeout": Option(int, "S", "seconds to wait for the other nodes; default: 300", whole(1)),
    "tf_config": Option(bool, "", "set TF_CONFIG in each rank, for TensorFlow's MultiWorkerMirroredStrategy"),
    **OPTIONS,
    # `Run` checks the two sizes together.
    **{name: replace(OPTIONS[name], check=check_positive) for name in ("batch_size", "micro_batch_size")},
}


Values = Mapping[str, Any]  # of the options that were given, by name


@dataclass(frozen=True)
class Target:
    """The code that the ranks run.

    Attributes:
        kind: "script" (a file), "module", "recipe" (a module of samestep) or "call" (a function call).
        arguments: of the script; of a call, the entries of sys.path.
        call: the pickled call.
    """

    kind: str
    name: str
    arguments: list[str] = field(default_factory=list)
    call: bytes = b""

    @property
    def said(self) -> str:
        """The name on a command line and in messages: of a recipe, without its package."""
        return self.name.rpartition(".")[2] if self.kind == "recipe" else self.name

    def to_words(self) -> list[str]:
        """Return the words after `samestep launch` and its options that start it. Not for a call."""
        return [*(["-m"] if self.kind == "module" else []), self.said, *self.arguments]

    def to_full_command(self, num_ranks: int, *flags: str) -> list[str]:
        """Return the command that starts it on several ranks of this machine, from the interpreter on.

        `flags`: further options of the launcher.
        """
        return [*COMMAND, "launch", "--nproc-per-node", str(num_ranks), *flags, *self.to_words()]


def check_target(target: Target) -> None:
    """Raise Error, before anything is started, if there is no such script."""
    path = Path(target.name)
    if target.kind == "script" and not (path.is_file() and os.access(path, os.R_OK)):
        raise Error(f"there is no script {target.name} that can be read (in {Path.cwd()})", code="SS110")


def parse_sizes(text: str) -> list[int]:
    """Parse the value of --world-sizes, such as "1,2,4". Raises Error if it is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise Error(f"--world-sizes takes numbers of ranks such as 1,2,4, not {text!r}", code="SS101")
    return [*dict.fromkeys(map(int, words))]


@cache
def find_recipes() -> dict[str, Path]:
    """Return the recipes: name -> file."""
    files = sorted((Path(__file__).parents[1] / "recipes").glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def describe_recipes() -> str:
    """Return a line for each recipe: its name, and the first line of its docstring."""
    texts = {
        name: ast.get_docstring(ast.parse(read_text(file, is_given=True))) for name, file in find_recipes().items()
    }
    return "".join(f"  {name:<12} {(text or '').partition(chr(10))[0]}\n" for name, text in texts.items())


class ScriptCommand(Command):
    """A command that starts SCRIPT, -m MODULE or RECIPE. Its options precede these; all words after them are theirs.

    The callback gets the words, the target and the values of the options that were given, by name.

    Args:
        flags: the options.
        words: name of a word before the target, such as "RUN", which options may follow; "": none.
    """

    usage = "SCRIPT | -m MODULE | RECIPE"

    def __init__(
        self,
        name: str,
        callback: Callable[..., int],
        flags: Mapping[str, Option],
        words: str = "",
        **settings: Any,
    ) -> None:
        params = [*build_options(flags), click.Option(["-m", "is_module"], is_flag=True, hidden=True)]
        super().__init__(name, callback=callback, **{**settings, "params": params})
        self._words = words
        self.context_settings.update(allow_extra_args=True, allow_interspersed_args=False)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options, the word and the target, and let them be the callback's arguments."""
        values, left = self.take(ctx, args)
        word = left[:1] if self._words else []
        if word:
            more, left = self.take(ctx, left[1:])
            values |= more
        if len(word) < bool(self._words) or not left:
            raise Error(
                f"{self.name} needs {f'{self._words} and ' if self._words else ''}a script or a recipe; see samestep "
                f"{self.name} --help",
                code="SS103",
            )
        named = dict(zip(self._words.lower().split(), word, strict=True))
        ctx.params = {**named, "target": self.build_target(left, values), "values": values}
        return []

    def take(self, ctx: click.Context, args: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the options at the beginning of `args`, and the other arguments."""
        inner = click.Context(self, ctx.parent, ctx.info_name, obj=ctx.obj, **self.context_settings)
        with inner.scope(cleanup=False):
            left = super().parse_args(inner, [*args])
        return take_values(inner.params), left

    def build_target(self, words: list[str], values: dict[str, Any]) -> Target:
        """Return the target that the words name, with its arguments. A script precedes a recipe of the same name.

        Removes -m from the values.
        """
        name, *arguments = words
        if values.pop("is_module", False):
            return Target("module", name, arguments)
        if name not in find_recipes() or Path(name).is_file():
            return Target("script", name, arguments)
        return build_recipe_target(name, arguments, values)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage line."""
        return [*self._words.split(), "[options]", self.usage, "[its arguments]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        sections = {
            f"Options of {self.name}": [param for param in self.params if param.name not in OPTIONS],
            "These replace arguments of samestep.Run in the script": [p for p in self.params if p.name in OPTIONS],
        }
        for title, params in sections.items():
            if rows := [row for param in params if (row := param.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def build_recipe_target(name: str, arguments: list[str], values: Values) -> Target:
    """Return the target that runs a recipe."""
    if "batch_size" in values:  # the recipe derives other numbers from it
        arguments = [*arguments, f"--batch-size={values['batch_size']}"]
    return Target("recipe", f"samestep.recipes.{name}", arguments)
