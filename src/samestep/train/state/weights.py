"""Loads weights of other programs into a model, of which each rank reads its part: `Run.load_weights`."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from samestep.decoding import decode
from samestep.errors import InvalidValue
from samestep.files import read_bytes
from samestep.train.state.names import strip_compiled
from samestep.train.state.sharded_init import ShardedInit, is_partial

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
MAX_NAMES = 3  # in messages


class _WeightIndex(Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class Saved:
    """A tensor in a file, of which nothing was read yet."""

    rows: Any  # of safetensors
    shape: tuple[int, ...]

    def read(self, first: int, last: int) -> Tensor:
        """Return the elements from `first` to `last`, in row-major order. Reads the rows that hold them."""
        if not self.shape:
            whole: Tensor = self.rows[...]
            return whole.reshape(-1)[first:last]
        row = max(1, prod(self.shape[1:]))
        begin = first // row
        some: Tensor = self.rows[begin : ceil(last / row)]
        return some.reshape(-1)[first - begin * row : last - begin * row]


def load_weights(
    model: nn.Module, path: Path, rename: Callable[[str], str] | None, init: ShardedInit, *, strict: bool
) -> None:
    """Load weights. Arguments and errors as for `Run.load_weights`. `init`: has built the model, or parts of it."""
    with ExitStack() as stack:
        try:
            saved = {name: each for file in find_files(path) for name, each in _open(file, stack).items()}
        except (OSError, ValueError, SafetensorError) as error:
            why = " ".join(str(error).split())
            raise InvalidValue(
                f"{path} holds no weights that can be read ({why}): name a .safetensors file, or a directory with "
                f"{SINGLE} or {INDEX}",
                code="SS605",
            ) from None
        own = {strip_compiled(key): value for key, value in model.state_dict(keep_vars=True).items()}
        wanted = {
            name: (rename(name) if rename else name, value) for name, value in own.items() if isinstance(value, Tensor)
        }
        _check(wanted, saved, path, strict=strict)
        found = [(value, saved[source]) for source, value in wanted.values() if source in saved]
        init.load(model, {id(value): each.read for value, each in found if is_partial(value)})
        with torch.no_grad():
            for value, each in found:
                if not is_partial(value):
                    value.copy_(each.read(0, value.numel()).view_as(value))


def find_files(path: Path) -> list[Path]:
    """Return the files of a model that Hugging Face saved, or the one file that was named.

    Raises:
        OSError, ValueError: the index cannot be read.
    """
    if path.is_dir():
        path = path / SINGLE if (path / SINGLE).exists() else path / INDEX
    if path.suffix != ".json":
        return [path]
    names = dict.fromkeys(decode(read_bytes(path, is_given=True), _WeightIndex).weight_map.values())
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"the index names the file {name}, which is not beside it")
    return [path.with_name(name) for name in names]


def _open(file: Path, stack: ExitStack) -> dict[str, Saved]:
    opened = stack.enter_context(safe_open(file, framework="pt"))
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    return {name: Saved(each, tuple(each.get_shape())) for name, each in slices.items()}


def _check(wanted: dict[str, tuple[str, Tensor]], saved: dict[str, Saved], path: Path, *, strict: bool) -> None:
    """Raise InvalidValue if the names or shapes are not those of the model. One name of a tied weight suffices."""
    found = {id(value) for source, value in wanted.values() if source in saved}
    missing = [name for name, (_, value) in wanted.items() if id(value) not in found]
    unused = sorted(saved.keys() - {source for source, _ in wanted.values()})
    for names, what in ((missing, "lacks {} of the model"), (unused, "has {}, which the model lacks")):
        if strict and names:
            shown = ", ".join(names[:MAX_NAMES]) + (
                f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            )
            raise InvalidValue(
                f"{path} {what.format(shown)}: pass rename=, which returns the name in the file for a name in the "
                "model, or strict=False to load what there is",
                code="SS605",
            )
    for name, (source, value) in wanted.items():
        if source in saved and saved[source].shape != tuple(value.shape):
            raise InvalidValue(
                f"{name} has the shape {tuple(value.shape)}, and {source} in {path} has {saved[source].shape}: build "
                "the model with the sizes of the file",
                code="SS605",
            )
