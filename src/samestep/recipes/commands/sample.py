"""`samestep sample`: generates text with a model that the recipe gpt has trained."""

import os
import sys
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samestep.command_line import Command
from samestep.console import escape
from samestep.decoding import convert
from samestep.errors import Error
from samestep.recipes import AMOUNT, COUNT
from samestep.snapshot.reading import open_run, read_run, read_snapshot
from samestep.tools.inspect import WHICH

if TYPE_CHECKING:
    from samestep.recipes.corpora.text_tokenizer import Tokenizer
    from samestep.recipes.models.gpt2 import GPT2


@click.command("sample", cls=Command)
@click.argument("run", type=click.Path())
@click.option("--prompt", metavar="TEXT", default="", help="text to continue; -: standard input; default: none")
@click.option("--max-tokens", type=COUNT, default=200, help="tokens to add at most (default: 200)")
@click.option("--temperature", type=AMOUNT, default=0.8, help="0 always takes the most likely token (default: 0.8)")
@click.option("--top-k", type=COUNT, help="sample among this many most likely tokens; default: all")
@click.option("--num-samples", type=COUNT, default=1, help="texts to generate, separated by a line --- (default: 1)")
@click.option("--seed", default=0, help="seed of the sampling (default: 0)")
@click.option("--snapshot", **WHICH, default="best", help="snapshot to use, such as latest; default: best")
def run_sample(
    run: str,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    num_samples: int,
    seed: int,
    snapshot: int | str,
) -> int:
    """Continues a text with a model that `samestep train gpt` has trained, up to its end or --max-tokens.

    The same seed gives the same text on the same machine. Example:

      samestep sample runs/gpt --prompt "def main(" --max-tokens 100 --temperature 0.5
    """
    text = os.fsdecode(sys.stdin.buffer.read()) if prompt == "-" else prompt
    with open_run(run, which=snapshot) as directory:
        model, tokenizer = load_model(directory, run, snapshot)
    begun = tokenizer.encode_prompt(text)

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()
    generator = torch.Generator().manual_seed(seed)
    for number in range(num_samples):
        generated = model.generate(
            torch.tensor(begun, device=device),
            temperature=temperature,
            top_k=top_k,
            generator=generator,
        )
        tokens = takewhile(lambda token: token != tokenizer.end, islice(generated, max_tokens))
        print("---\n" * (number > 0) + escape(tokenizer.decode([*begun, *tokens])), flush=True)
    return 0


def load_model(directory: Path, called: str, which: int | str) -> tuple["GPT2", "Tokenizer"]:
    """Build the model and the tokenizer of a run from a snapshot.

    Args:
        called: the run as the user gave it.

    Raises:
        Error: there is no run of the recipe gpt, or no such snapshot.
    """
    read_run(directory, called)  # there is a run
    _, saved = read_snapshot(directory, called, which)

    from samestep.recipes.corpora.text_tokenizer import Tokenizer
    from samestep.recipes.models.gpt2 import GPT2, GPT2Config

    try:
        model = GPT2(convert(saved["state"]["model"], GPT2Config))
        model.load_state_dict(saved["objects"]["model"])
        return model, Tokenizer(**saved["objects"]["tokenizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise Error(
            f"{called} is no run of the recipe gpt: name one that samestep train gpt has made ({why})", code="SS703"
        ) from None
