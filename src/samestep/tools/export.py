"""`samestep export`: writes the weights in a snapshot for other programs, as safetensors."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samestep.cli import PATH, Command, json_option, print_json
from samestep.console import escape
from samestep.errors import Error
from samestep.files import open_regular, replacing
from samestep.hashing import view_bytes
from samestep.snapshot.run_record import find_snapshot, open_run
from samestep.snapshot.store import SavedObjects, Store
from samestep.tools.inspect import WHICH

if TYPE_CHECKING:
    from torch import Tensor

    from samestep.snapshot.serialization import SavedState


@click.command("export", cls=Command)
@click.argument("run", type=click.Path())
@click.argument("file", type=PATH)
@click.option("--snapshot", "which", **WHICH, default="latest", help="default: the newest undamaged one")
@click.option(
    "--object", "wanted", metavar="NAME", help="object of run.prepare, such as ema; default: the only model of the run"
)
@json_option
def run_export(run: str, file: Path, which: int | str, wanted: str | None, is_json: bool) -> None:
    """Writes a model's weights under the names of its state_dict, those of an AveragedModel under its model's.

    Load FILE with model.load_state_dict(safetensors.torch.load_file(FILE)).
    """
    if file.exists():
        raise Error(f"{file} exists already: name another file, or remove it", code="SS113")
    with open_run(run) as (directory, _):
        store = Store(directory)
        snapshot = find_snapshot(store, run, which)
        saved = store.open(snapshot, SavedObjects)
        objects = saved.contents["objects"]
        name = wanted or _choose(objects)
        if name not in objects:
            raise Error(
                f"the snapshot has no {name}: it has {', '.join(objects)}; name one of them by --object",
                code="SS705",
            )
        outlines, others = _find_tensors(name, objects[name], objects)
        source = {"run": os.fsencode(run).decode(errors="replace"), "step": str(snapshot.step), "object": name}
        _write(file, saved, outlines, source)
    num_bytes = file.stat().st_size
    if is_json:
        print_json(
            {
                "file": str(file),
                "object": name,
                "step": snapshot.step,
                "num_tensors": len(outlines),
                "size_bytes": num_bytes,
                "left_out": others,
            }
        )
    else:
        left_out = f", without {', '.join(others)}" if others else ""
        what = f"{len(outlines)} tensors of {name} after step {snapshot.step}, {num_bytes:,} bytes"
        print(escape(f"{file}: {what}{left_out}"))


def _write(file: Path, saved: "SavedState", outlines: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, one tensor after the other.

    Args:
        outlines: a tensor on the meta device for each name.
        metadata: for the header.
    """
    from samestep.snapshot.serialization import lay_out_tensors

    try:
        header, ordered = lay_out_tensors(outlines, {"format": "pt", **metadata})
        with replacing(file, sync=True) as partial, open(partial, "xb", opener=open_regular) as opened:
            opened.write(header)
            for name in ordered:
                opened.write(view_bytes(_read(saved, name, outlines[name])))
    except (OSError, ValueError) as error:  # ValueError: a name that is no UTF-8
        raise Error(f"{file} cannot be written ({error}): name another file", code="SS113") from None


def _read(saved: "SavedState", name: str, outline: "Tensor") -> "Tensor":
    try:
        tensor: Tensor = saved.fill(outline)
    except (OSError, EOFError, ValueError) as error:
        raise Error(
            f"{name} cannot be read from the snapshot ({error}): name another by --snapshot", code="SS410"
        ) from None
    return tensor.contiguous()


def _choose(objects: Mapping[str, Any]) -> str:
    """Return the default object: `model`, or the only module that is not an average."""
    if "model" in objects:
        return "model"
    models = [name for name, state in objects.items() if isinstance(state, dict) and hasattr(state, "_metadata")]
    models = [name for name in models if not _is_average(objects[name])] or models
    if len(models) != 1:
        raise Error(f"the snapshot has {', '.join(objects)}: name the model by --object", code="SS705")
    return models[0]


def _is_average(state: Any) -> bool:
    """Return whether a state is that of an AveragedModel."""
    if not isinstance(state, dict) or "n_averaged" not in state or len(state) == 1:
        return False
    return all(key == "n_averaged" or key.startswith("module.") for key in state)


def _find_tensors(name: str, state: Any, objects: Mapping[str, Any]) -> tuple[dict[str, "Tensor"], list[str]]:
    """Return the tensors of a module's state_dict, and the names of its other entries.

    Tied weights are under each of their names.

    Raises:
        Error: the object `name` of the snapshot's `objects` is not a model.
    """
    import torch

    if _is_average(state):
        state = {key.removeprefix("module."): value for key, value in state.items() if key != "n_averaged"}
    entries = state.items() if isinstance(state, dict) else ()
    tensors = {str(key): value for key, value in entries if isinstance(value, torch.Tensor)}
    if not tensors:
        raise Error(
            f"{name} has no tensors by name: it is not a model; the snapshot has {', '.join(objects)}", code="SS705"
        )
    return tensors, [str(key) for key, _ in entries if str(key) not in tensors]
