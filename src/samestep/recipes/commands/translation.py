"""`samestep translate`: translates lines with the weights of a run of the recipe translate."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from samestep.console import say
from samestep.errors import Error
from samestep.files import is_object
from samestep.snapshot.reading import open_run, read_run, read_snapshot
from samestep.tools.export import unwrap_average
from samestep.tools.inspect import CommandParser, parse_which

if TYPE_CHECKING:
    from samestep.recipes.models.seq2seq import Seq2Seq
    from samestep.recipes.translate import Vocabulary

DESCRIPTION = """\
Translates the lines of the standard input with a run of the recipe translate. Each line of the output translates a line
of the input, and is written as soon as it is complete. An empty line stays empty.

  samestep translate runs/translate < text.en > text.de
  echo "no such file or directory" | samestep translate runs/translate --beam 5

The weights are those of the snapshot "best", which has the best BLEU; after training with --ema, the averaged weights.
"""


def run_translate(args: list[str]) -> int:
    """Run the command with the arguments after its name. Returns the exit code.

    Raises:
        Error: there is no run, no sound snapshot or no such device, the run is not of the recipe translate, or a line
            cannot be translated.
    """
    options = _build_parser().parse_args(args)
    if options.beam < 1:
        raise Error(f"--beam must be at least 1, not {options.beam}")
    with open_run(options.run, which=options.snapshot) as run:
        read_run(run, options.run)
        _, contents = read_snapshot(run, options.run, options.snapshot, {"objects": is_object})
    vocabulary, model = _build_model(contents["objects"], options.run)
    try:
        model.to(options.device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise Error(
            f"--device {options.device} cannot be used ({str(error).partition(chr(10))[0]}): name another"
        ) from None
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for one line at a time, threads cost more than they save
    try:
        num_skipped = _translate_lines(vocabulary, model, options)
    finally:
        torch.set_num_threads(num_threads)
    if num_skipped:
        say(f"{num_skipped} lines were too long for the model and left empty")
    return 0


def _translate_lines(vocabulary: "Vocabulary", model: "Seq2Seq", options: argparse.Namespace) -> int:
    """Print the translation of each line of the input. Returns the number of lines that were too long.

    Raises:
        Error: a line is too long, and was not to be skipped, or is not UTF-8.
    """
    num_skipped = 0
    for number, line in enumerate(_read_lines(), start=1):
        tokens = vocabulary.encode(line)
        is_long = tokens.shape[1] > model.max_length
        if is_long and not options.skip_long:
            raise Error(
                f"line {number} of the input has {tokens.shape[1]} tokens, and the model takes {model.max_length}: "
                "divide it, or leave such lines empty by --skip-long"
            )
        num_skipped += is_long
        rows = []
        if line and not is_long:
            rows = model.translate(tokens.to(options.device), options.beam, options.length_penalty)
        print(" ".join(" ".join(vocabulary.target.decode(rows)).split()), flush=True)
    return num_skipped


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="samestep translate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its URL")
    parser.add_argument(
        "--beam",
        type=int,
        default=4,
        metavar="N",
        help="beam width; 1: greedy decoding (default: 4)",
    )
    parser.add_argument(
        "--length-penalty", type=float, default=1.0, metavar="A",
        help="candidates are ranked by log probability / length**A; a larger A favours longer ones (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--snapshot", metavar="STEP|NAME", default="best", type=parse_which,
        help="snapshot to use: best, latest, another name, or a step (default: best)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="device, such as cuda (default: cpu)")
    parser.add_argument(
        "--skip-long", action="store_true", help="write an empty line for a line that is too long, instead of an error"
    )
    return parser


def _build_model(objects: Mapping[str, Any], run: str) -> "tuple[Vocabulary, Seq2Seq]":
    """Return the tokenizers and the model of a snapshot. Raises Error if it is of another recipe."""
    saved = objects.get("vocabulary")
    if not isinstance(saved, dict) or saved.keys() != {"source", "target", "settings"} or "model" not in objects:
        raise Error(
            f"{run} is no run of the recipe translate, its snapshot holds {', '.join(objects)}: name a run that "
            "`samestep train translate` has made"
        )
    from samestep.recipes.corpora.bpe import Tokenizer
    from samestep.recipes.translate import Vocabulary

    vocabulary = Vocabulary(Tokenizer(saved["source"]), Tokenizer(saved["target"]), saved["settings"])
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
            raise Error(f"line {number} of the input is not UTF-8 ({error.reason}): convert the input") from None
