"""`samestep translate`: translates lines with the weights of a run of the recipe translate."""

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from samestep.command_line import Command
from samestep.console import say
from samestep.errors import Error
from samestep.snapshot.reading import open_run, read_run, read_snapshot
from samestep.tools.export import unwrap_average
from samestep.tools.inspect import WHICH

if TYPE_CHECKING:
    from samestep.recipes.models.seq2seq import Seq2Seq
    from samestep.recipes.translate import Vocabulary


@click.command("translate", cls=Command)
@click.argument("run", type=click.Path())
@click.option("--beam", metavar="N", type=int, default=4, help="beam width; 1: greedy decoding (default: 4)")
@click.option(
    "--length-penalty",
    metavar="A",
    type=float,
    default=1.0,
    help="candidates are ranked by log probability / length**A; a larger A favours longer ones (default: 1)",
)
@click.option("--snapshot", **WHICH, default="best", help="best, latest, another name, or a step (default: best)")
@click.option("--device", default="cpu", help="device, such as cuda (default: cpu)")
@click.option("--skip-long", is_flag=True, help="write an empty line for one that is too long, instead of an error")
def run_translate(run: str, beam: int, length_penalty: float, snapshot: int | str, device: str, skip_long: bool) -> int:
    """Translates the lines of the standard input with a run of the recipe translate.

    Each line of the output translates a line of the input, and is written as soon as it is complete. An empty line
    stays empty.

      samestep translate runs/translate < text.en > text.de
      echo "no such file or directory" | samestep translate runs/translate --beam 5

    The weights are those of the snapshot "best", which has the best BLEU; after training with --ema, the averaged
    weights.
    """
    if beam < 1:
        raise Error(f"--beam must be at least 1, not {beam}", code="SS101")
    with open_run(run, which=snapshot) as directory:
        read_run(directory, run)
        _, contents = read_snapshot(directory, run, snapshot)
    vocabulary, model = _build_model(contents["objects"], run)
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise Error(
            f"--device {device} cannot be used ({str(error).partition(chr(10))[0]}): name another", code="SS111"
        ) from None
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for one line at a time, threads cost more than they save
    try:
        num_skipped = _translate_lines(vocabulary, model, device, beam, length_penalty, skip_long=skip_long)
    finally:
        torch.set_num_threads(num_threads)
    if num_skipped:
        say(f"{num_skipped} lines were too long for the model and left empty")
    return 0


def _translate_lines(
    vocabulary: "Vocabulary", model: "Seq2Seq", device: str, beam: int, length_penalty: float, *, skip_long: bool
) -> int:
    """Print the translation of each line of the input. Returns the number of lines that were too long.

    Raises:
        Error: a line is too long, and was not to be skipped, or is not UTF-8.
    """
    num_skipped = 0
    for number, line in enumerate(_read_lines(), start=1):
        tokens = vocabulary.encode(line)
        is_long = tokens.shape[1] > model.max_length
        if is_long and not skip_long:
            raise Error(
                f"line {number} of the input has {tokens.shape[1]} tokens, and the model takes {model.max_length}: "
                "divide it, or leave such lines empty by --skip-long",
                code="SS704",
            )
        num_skipped += is_long
        rows = []
        if line and not is_long:
            rows = model.translate(tokens.to(device), beam, length_penalty)
        print(" ".join(" ".join(vocabulary.target.decode(rows)).split()), flush=True)
    return num_skipped


def _build_model(objects: Mapping[str, Any], run: str) -> "tuple[Vocabulary, Seq2Seq]":
    """Return the tokenizers and the model of a snapshot. Raises Error if it is of another recipe."""
    saved = objects.get("vocabulary")
    if not isinstance(saved, dict) or saved.keys() != {"source", "target", "settings"} or "model" not in objects:
        raise Error(
            f"{run} is no run of the recipe translate, its snapshot holds {', '.join(objects)}: name a run that "
            "`samestep train translate` has made",
            code="SS703",
        )
    from samestep.recipes.corpora.bpe import BytePairTokenizer
    from samestep.recipes.translate import Vocabulary

    vocabulary = Vocabulary(BytePairTokenizer(saved["source"]), BytePairTokenizer(saved["target"]), saved["settings"])
    weights = objects["model"]
    if average := objects.get("ema"):
        weights = unwrap_average(average)
    model = vocabulary.build_model()
    model.load_state_dict(weights)
    return vocabulary, model.eval()


def _read_lines() -> Iterator[str]:
    """Yield the lines of the standard input, without spaces at their ends. Raises Error for one that is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode().strip()
        except UnicodeDecodeError as error:
            raise Error(
                f"line {number} of the input is not UTF-8 ({error.reason}): convert the input", code="SS701"
            ) from None
