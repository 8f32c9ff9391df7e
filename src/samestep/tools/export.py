"""`samestep export`: writes the weights in a snapshot as files for other programs: safetensors, or torch.save's."""

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from samestep.command_line import PATH, Command
from samestep.console import escape
from samestep.errors import Error
from samestep.files import creating_directory, open_regular, replace_file, replacing
from samestep.snapshot.reading import open_run, open_snapshot, read_run
from samestep.snapshot.serialization import lay_out_tensors
from samestep.tagged import view_bytes
from samestep.tools.inspect import WHICH

if TYPE_CHECKING:
    from torch import Tensor

    from samestep.snapshot.serialization import SavedState

SHARD_SIZE = "5GB"
SUFFIXES = (".safetensors", ".pt", ".pth")  # they choose the format; without one, a directory is written
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # as Hugging Face reads them

Read = Callable[[str], "Tensor"]


@click.command("export", cls=Command)
@click.argument("run", type=click.Path())
@click.argument("file", type=PATH)
@click.option("--snapshot", "which", **WHICH, default="latest", help="default: the newest undamaged one")
@click.option(
    "--object",
    "wanted",
    metavar="NAME",
    help="write only this object of run.prepare, such as model or ema; default: the only model and all averages",
)
@click.option("--force", is_flag=True, help="replace existing files")
@click.option("--max-shard-size", metavar="SIZE", help=f"of the files in a directory; default: {SHARD_SIZE}")
def run_export(
    run: str,
    file: Path,
    which: int | str,
    wanted: str | None,
    force: bool,
    max_shard_size: str | None,
) -> int:
    """Writes a model's weights under the names of its state_dict.

    The suffix of FILE chooses the format: load .safetensors with
    model.load_state_dict(safetensors.torch.load_file(FILE)), .pt and .pth with model.load_state_dict(torch.load(FILE)).
    Each AveragedModel, such as an EMA, is written to a separate file: for FILE model.safetensors, the object ema of
    run.prepare is written to model.ema.safetensors.

    .safetensors is written one tensor at a time, so the model need not fit in memory. Without a suffix, FILE is a new
    directory of such files for one object, as Hugging Face writes them, for from_pretrained.
    """
    max_bytes = parse_size(max_shard_size or SHARD_SIZE)
    if max_shard_size is not None and file.suffix:
        raise Error("--max-shard-size is for a directory: leave it out, or the suffix of FILE", code="SS104")
    if force and not file.suffix:
        raise Error("--force replaces files, and a directory must be new: leave it out", code="SS104")
    if file.suffix not in ("", *SUFFIXES):
        raise Error(f"{file} ends in none of {', '.join(SUFFIXES)}: name a file that does", code="SS101")
    with open_run(run, which=which) as directory:
        read_run(directory, run)
        snapshot, saved = open_snapshot(directory, run, which)
        objects = saved.contents["objects"]
        name = wanted or _choose(objects)
        if name not in objects:
            raise Error(
                f"the snapshot holds no {name}: it holds {', '.join(objects)}; name one of them by --object",
                code="SS705",
            )
        source = {"run": os.fsencode(run).decode(errors="replace"), "step": str(snapshot.step)}
        if not file.suffix:
            print(escape(_write_directory(file, saved, name, source | {"object": name}, max_bytes)))
            return 0
        files = {name: file}
        if wanted is None:
            averages = [other for other, state in objects.items() if other != name and _is_average(state)]
            files |= {average: _name_file(file, average) for average in averages}
        existing = [file for file in files.values() if file.exists()]
        if existing and not force:
            raise Error(f"{existing[0]} exists already: name another file, or replace it with --force", code="SS113")
        for name, file in files.items():
            print(escape(_write_file(file, saved, name, source | {"object": name})))
    return 0


def _write_file(file: Path, saved: "SavedState", name: str, metadata: Mapping[str, str]) -> str:
    """Write or replace a file with the tensors of an object. Returns what was written, in words."""
    objects = saved.contents["objects"]
    outlines, others = _find_tensors(name, objects[name], objects)
    if file.suffix == ".safetensors":
        _check_dtypes(outlines)
        read = _build_reader(saved, outlines)
        num_bytes = _replace(file, lambda opened: write_safetensors(opened, outlines, read, metadata))
        return _describe(file, len(outlines), metadata, num_bytes, _without(others))
    import torch

    tensors = {key: value.clone(memory_format=torch.contiguous_format) for key, value in saved.fill(outlines).items()}
    kept = {key: value for key, value in saved.fill(others).items() if _is_loadable(value)}
    num_bytes = _replace(file, lambda opened: torch.save(tensors | kept, opened))
    return _describe(file, len(tensors), metadata, num_bytes, _without(others.keys() - kept.keys()))


def _write_directory(path: Path, saved: "SavedState", name: str, metadata: Mapping[str, str], max_bytes: int) -> str:
    """Write the tensors of an object to a new directory. Returns what was written, in words."""
    objects = saved.contents["objects"]
    outlines, others = _find_tensors(name, objects[name], objects)
    _check_dtypes(outlines)
    kept: dict[int, str] = {}
    tied = {
        key: first
        for key, value in outlines.items()
        if (first := kept.setdefault(id(value), key)) != key and value.numel()
    }
    outlines = {key: value for key, value in outlines.items() if key not in tied}
    num_bytes = export_directory(path, outlines, _build_reader(saved, outlines), metadata, max_bytes)
    left_out = "".join(f", without {key}, which is {first}" for key, first in tied.items())
    return _describe(path, len(outlines), metadata, num_bytes, left_out + _without(others))


def _check_dtypes(outlines: Mapping[str, "Tensor"]) -> None:
    """Raise Error if safetensors lacks the dtype of a tensor."""
    import torch

    for key, value in outlines.items():
        if value.dtype in (torch.complex32, torch.complex128):
            raise Error(
                f"{key} has the dtype {value.dtype}, which safetensors lacks: name a .pt file",
                code="SS101",
            )


def _build_reader(saved: "SavedState", outlines: Mapping[str, "Tensor"]) -> Read:
    """Return a function that reads one of some tensors. It raises Error."""

    def read(key: str) -> "Tensor":
        try:
            tensor: Tensor = saved.fill(outlines[key])
        except (OSError, EOFError, ValueError) as error:
            raise Error(
                f"{key} cannot be read from the snapshot ({error}): name another by --snapshot", code="SS410"
            ) from None
        return tensor.contiguous()

    return read


def export_directory(
    path: Path, outlines: Mapping[str, "Tensor"], read: Read, metadata: Mapping[str, str], max_bytes: int
) -> int:
    """Write tensors to a new directory as Hugging Face does. It appears when it is whole. Returns its size in bytes.

    Args:
        outlines: a tensor on the meta device for each name.
        read: returns the tensor with a name. It is called for one tensor after the other.
        metadata: for the headers.
        max_bytes: of the tensors in a file; a larger tensor has a file of its own.

    Raises:
        Error: the directory exists and is not empty, or cannot be written.
    """
    try:
        if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
            raise Error(f"{path} exists already: name a new directory", code="SS113")
        with creating_directory(path) as hidden:
            _write_shards(hidden, outlines, read, metadata, max_bytes)
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


def _write_shards(
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


def _without(left_out: Collection[str]) -> str:
    """Return the end of a message that names entries of the state that were not written."""
    return f", without {', '.join(left_out)}, which the format does not hold" if left_out else ""


def _describe(path: Path, num_tensors: int, metadata: Mapping[str, str], num_bytes: int, without: str) -> str:
    """Describe what was written. `without`: the end of the message."""
    what = f"{num_tensors} tensors of {metadata['object']} after step {metadata['step']}"
    return f"{path}: {what}, {num_bytes:,} bytes{without}"


def _name_file(file: Path, name: str) -> Path:
    """Return the file of an average, beside the model's: `out.ema.safetensors` for `out.safetensors`."""
    part = re.sub(r"[^\w.-]", ".", name)  # a snapshot can hold any text as a name
    return file.with_name(f"{file.stem}.{part}{file.suffix}")


def _choose(objects: Mapping[str, Any]) -> str:
    """Return the default object: `model`, or the only module that is not an average."""
    if "model" in objects:
        return "model"
    models = [name for name, state in objects.items() if isinstance(state, dict) and hasattr(state, "_metadata")]
    models = [name for name in models if not _is_average(objects[name])] or models
    if len(models) != 1:
        raise Error(f"the snapshot holds {', '.join(objects)}: name the model by --object", code="SS705")
    return models[0]


def _is_average(state: Any) -> bool:
    """Return whether a state is that of an AveragedModel."""
    if not isinstance(state, dict) or "n_averaged" not in state or len(state) == 1:
        return False
    return all(key == "n_averaged" or key.startswith("module.") for key in state)


def unwrap_average(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an AveragedModel under the names of its model, without the count of updates."""
    return {key.removeprefix("module."): value for key, value in state.items() if key != "n_averaged"}


def _find_tensors(name: str, state: Any, objects: Mapping[str, Any]) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
    """Return the tensors of a module's state_dict, and the other entries. Tied weights are under each of their names.

    Raises:
        Error: the object `name` of the snapshot's `objects` is not a model.
    """
    import torch

    if _is_average(state):
        state = unwrap_average(state)
    entries = state.items() if isinstance(state, dict) else ()
    tensors = {str(key): value for key, value in entries if isinstance(value, torch.Tensor)}
    if not tensors:
        raise Error(
            f"{name} has no tensors by name: it is not a model; the snapshot holds {', '.join(objects)}", code="SS705"
        )
    return tensors, {str(key): value for key, value in entries if str(key) not in tensors}


def _is_loadable(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) can read an entry that is not a tensor."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _replace(file: Path, write: Callable[[BinaryIO], object]) -> int:
    """Write or replace a file atomically. Returns its size in bytes. `write`: writes the content."""
    try:
        # torch.save raises RuntimeError for a path that it cannot write.
        with replacing(file) as partial, open(partial, "xb", opener=open_regular) as opened:
            write(opened)
        return file.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a name that is no UTF-8
        raise Error(f"{file} cannot be written ({error}): name another file", code="SS113") from None
