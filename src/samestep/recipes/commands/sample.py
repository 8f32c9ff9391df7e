"""`samestep sample`: generates text with a model that the recipe gpt has trained."""

import math
import os
import sys
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.console import escape
from samestep.errors import Error
from samestep.files import fits, is_count, is_flag, is_number, is_object, is_text
from samestep.snapshot.reading import open_run, read_run, read_snapshot
from samestep.tools.inspect import CommandParser, parse_which

if TYPE_CHECKING:
    from samestep.recipes.corpora.text_tokenizer import Tokenizer
    from samestep.recipes.models.gpt2 import GPT2

SIZES = {
    "vocabulary_size": is_count, "context": is_count, "num_layers": is_count, "num_heads": is_count,
    "width": is_count, "dropout": is_number,
}  # fmt: skip
CONFIG = {"tokenizer": is_text, "checkpoint_activations": is_flag}  # in run.json
TOKENIZER = {"kind": is_text, "vocabulary_size": is_count}
SAVED = {"objects": {"model": is_object, "tokenizer": TOKENIZER}, "state": {"model": SIZES}}


def run_sample(args: list[str]) -> int:
    """Run the command with the arguments after its name. Returns the exit code.

    Raises:
        Error: an argument is wrong, there is no run of the recipe or no such snapshot, or the tokenizer cannot
            represent the prompt.
    """
    options = _build_parser().parse_args(args)
    for name in ("max_tokens", "num_samples"):
        if getattr(options, name) < 1:
            raise Error(f"--{name.replace('_', '-')} is {getattr(options, name)}: give 1 or more")
    if not 0 <= options.temperature < math.inf:
        raise Error(f"--temperature is {options.temperature}: give 0 (the most likely token) or more")
    if options.top_k is not None and options.top_k < 1:
        raise Error(f"--top-k is {options.top_k}: give 1 or more")
    if options.prompt == "-":
        options.prompt = os.fsdecode(sys.stdin.buffer.read())
    with open_run(options.run, which=options.snapshot) as directory:
        model, tokenizer = load_model(directory, options.run, options.snapshot)
    prompt = tokenizer.encode_prompt(options.prompt)

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()
    generator = torch.Generator().manual_seed(options.seed)
    for number in range(options.num_samples):
        generated = model.generate(
            torch.tensor(prompt, device=device), temperature=options.temperature, top_k=options.top_k,
            generator=generator,
        )  # fmt: skip
        tokens = takewhile(lambda token: token != tokenizer.end, islice(generated, options.max_tokens))
        print("---\n" * (number > 0) + escape(tokenizer.decode([*prompt, *tokens])), flush=True)
    return 0


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="samestep sample",
        description="Continues a text with a model that `samestep train gpt` has trained, up to the end of the "
        "document or --max-tokens. The same seed gives the same text on the same machine.",
        epilog='Example: samestep sample runs/gpt --prompt "def main(" --max-tokens 100 --temperature 0.5',
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its URL")
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="text to continue; -: standard input; default: none"
    )
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to add at most (default: 200)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always takes the most likely token (default: 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K most likely tokens; default: all")
    parser.add_argument(
        "--num-samples",
        type=int,
        default=1,
        metavar="N",
        help="texts to generate, separated by a line --- (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--snapshot",
        metavar="STEP|NAME",
        default="best",
        type=parse_which,
        help="snapshot to use, such as latest; default: best",
    )
    return parser


def load_model(directory: Path, called: str, which: int | str) -> tuple["GPT2", "Tokenizer"]:
    """Build the model and the tokenizer of a run from a snapshot.

    Args:
        called: the run as the user gave it.

    Raises:
        Error: there is no run of the recipe gpt, or no such snapshot.
    """
    another = Error(f"{called} is no run of the recipe gpt: name one that samestep train gpt has made")
    if not fits(read_run(directory, called).get("config"), CONFIG):
        raise another
    _, saved = read_snapshot(directory, called, which, {"objects": is_object, "state": is_object})
    if not fits(saved, SAVED):
        raise another
    objects, sizes = saved["objects"], saved["state"]["model"]

    from samestep.recipes.corpora.text_tokenizer import Tokenizer
    from samestep.recipes.models.gpt2 import GPT2, GPT2Config

    try:
        model = GPT2(GPT2Config(**{name: sizes[name] for name in SIZES}))
        model.load_state_dict(objects["model"])
        return model, Tokenizer.from_state_dict(objects["tokenizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise Error(f"the model in {called} cannot be built ({why}): the snapshot was changed") from None
