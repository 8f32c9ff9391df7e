"""Exports the tensors of a model to a directory, one tensor in memory at a time: Hugging Face's safetensors, or DCP."""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from samestep.errors import Error
from samestep.files import creating_directory, open_regular, replace_file
from samestep.snapshot.serialization import lay_out_tensors
from samestep.tagged import view_bytes

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("safetensors", "dcp")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # as Hugging Face reads them

Read = Callable[[str], "Tensor"]


def parse_size(text: str) -> int:
    """Return a number of bytes, such as `5GB`, which is 5 * 10**9. Raises Error.

    Example::

        >>> parse_size("5GB"), parse_size("1000")
        (5000000000, 1000)
    """
    unit = text[-2:].upper()
    number = text[:-2] if unit in _UNITS else text
    if not (number.isascii() and number.isdecimal() and int(number)):
        raise Error(f"--max-shard-size is {text}: pass a size, such as 5GB or 500MB", code="SS101")
    return int(number) * _UNITS.get(unit, 1)


def export_directory(
    path: Path, form: str, outlines: Mapping[str, "Tensor"], read: Read, metadata: Mapping[str, str], max_bytes: int
) -> int:
    """Write tensors to a new directory, which appears when it is whole. Returns the number of bytes in it.

    Args:
        form: one of `FORMATS`.
        outlines: a tensor on the meta device for each name.
        read: returns the tensor with a name. It is called for one tensor after the other.
        metadata: for the headers of safetensors.
        max_bytes: of the tensors in a file of safetensors; a larger tensor has a file of its own.

    Raises:
        Error: the directory exists and is not empty, or cannot be written.
    """
    try:
        if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
            raise Error(f"{path} exists already: name a new directory", code="SS113")
        with creating_directory(path) as hidden:
            if form == "dcp":
                _write_dcp(hidden, outlines, read)
            else:
                _write_safetensors(hidden, outlines, read, metadata, max_bytes)
            return sum(file.stat().st_size for file in hidden.iterdir())
    except (OSError, ValueError) as error:  # ValueError: a name that is no UTF-8
        raise Error(f"{path} cannot be written ({error}): name another directory", code="SS113") from None


def split(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Return the names of the tensors in each file, as `huggingface_hub.split_torch_state_dict_into_shards` does.

    Example::

        >>> split({"a": 3, "b": 9, "c": 3, "d": 4}, 6)
        [['b'], ['a', 'c'], ['d']]
    """
    full: list[list[str]] = []
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if size > max_bytes:
            full.append([name])
            continue
        if total + size > max_bytes:
            full.append(names)
            names, total = [], 0
        names.append(name)
        total = total + size
    return [*full, names] if names else full


def write_safetensors(
    file: BinaryIO, outlines: Mapping[str, "Tensor"], read: Read, metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, one tensor after the other. Arguments as for `export_directory`.

    Raises:
        OSError: the disk is full or gone.
    """
    header, ordered = lay_out_tensors(outlines, {"format": "pt", **metadata})
    file.write(header)
    for name in ordered:
        file.write(view_bytes(read(name)))
    file.flush()
    os.fsync(file.fileno())


def _write_safetensors(
    directory: Path, outlines: Mapping[str, "Tensor"], read: Read, metadata: Mapping[str, str], max_bytes: int
) -> None:
    sizes = {name: outline.numel() * outline.element_size() for name, outline in outlines.items()}
    shards = split(sizes, max_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        suffix = f"-{index:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = directory / f"model{suffix}.safetensors"
        weight_map |= dict.fromkeys(names, file.name)
        with open(file, "xb", opener=open_regular) as opened:
            write_safetensors(opened, {name: outlines[name] for name in names}, read, metadata)
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        replace_file(directory / "model.safetensors.index.json", text.encode(), sync=True)


def _write_dcp(directory: Path, outlines: Mapping[str, "Tensor"], read: Read) -> None:
    """Write with torch's writer. It keeps the tensors of a file in memory, so each tensor has a file of its own."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        """Reads a tensor when it is written."""

        def lookup_object(self, index: MetadataIndex) -> "Tensor":
            return read(index.fqn)

    writer = FileSystemWriter(directory, single_file_per_rank=False, thread_count=1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is the intent
            save(dict(outlines), storage_writer=writer, planner=Planner(), no_dist=True)
    except CheckpointException as failure:  # it holds any exception, such as KeyboardInterrupt
        error, _ = next(iter(failure.failures.values()))
        cause: BaseException | None = error
        # torch.save raises RuntimeError while it handles that of the file, or a signal.
        while cause is not None and not isinstance(cause, (OSError, Error, KeyboardInterrupt)):
            cause = cause.__context__
        raise cause or error from None
