"""The objects that a script's variables refer to."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from samestep.train.generators import NUMPY_GENERATOR, PYTHON_GENERATOR

MAX_DEPTH = 4
MAX_LOOKS = 20_000
MAX_ITEMS = 1000  # of one object


def find_things(
    roots: Mapping[str, Any], is_wanted: Callable[[Any], bool], max_looks: int = MAX_LOOKS, known: Iterable[int] = ()
) -> dict[str, Any]:
    """Return the wanted objects that are reachable from `roots` and from the script's variables: path -> object.

    These are the variables of the script's modules and of the running functions. The global generators are omitted,
    because samestep seeds them.

    Args:
        known: ids of objects that are neither returned nor searched.
    """
    things = [(name, root, 0) for name, root in roots.items()]
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != "samestep":
            things += _list_variables("", frame.f_locals)
        frame = frame.f_back
    things += _list_variables("", vars(sys.modules["__main__"]))
    modules = _find_own_modules()
    for module in modules:
        things += _list_variables(f"{module.__name__}.", vars(module))
    homes = {"__main__", *(module.__name__ for module in modules)}
    found: dict[str, Any] = {}
    seen = {id(PYTHON_GENERATOR), id(NUMPY_GENERATOR), id(torch.default_generator), *known}
    max_looks += len(seen)
    for path, thing, depth in things:  # grows during the loop
        if len(seen) > max_looks:
            break
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if is_wanted(thing):
            found[path] = thing
        if depth < MAX_DEPTH and (not isinstance(thing, type) or thing.__module__ in homes):
            things += [(f"{path}{step}", value, depth + 1) for step, value in look_into(thing)]
    return found


def _list_variables(prefix: str, variables: Mapping[str, Any]) -> list[tuple[str, Any, int]]:
    return [(f"{prefix}{name}", value, 0) for name, value in variables.items() if not name.startswith("__")]


def _find_own_modules() -> list[ModuleType]:
    """Return the script's modules except `__main__`: those in files below its directory or the current one."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    places = [Path.cwd()] if main is None else [Path.cwd(), Path(main).absolute().parent]
    homes = tuple(f"{home}{os.sep}" for place in places for home in (place, place.resolve()))
    libraries = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", sysconfig.get_path("stdlib"))
    found = []
    others = {"__main__", "samestep"}
    for name, module in [*sys.modules.items()]:
        root = name.partition(".")[0]
        if root in others:
            continue
        file = getattr(module, "__file__", None) or ""
        if file.startswith(homes) and file.endswith(".py") and not any(library in file for library in libraries):
            found.append(module)
        elif name == root and file:  # nor are the modules of this package, of which torch alone has 1,500
            others.add(root)
    return found


def look_into(thing: Any) -> list[tuple[str, Any]]:
    """Return the contents of an object with path suffixes: attributes and items. Calls no method of the script."""
    kind = type(thing)
    if kind.__module__.partition(".")[0] == "samestep" or issubclass(kind, ModuleType | torch.Tensor):
        return []
    if issubclass(kind, dict):
        return [(f"[{key!r}]", value) for key, value in islice([*dict.items(thing)], MAX_ITEMS)]
    if issubclass(kind, list | tuple):
        items = list.__iter__(thing) if issubclass(kind, list) else tuple.__iter__(thing)
        return [(f"[{i}]", value) for i, value in enumerate(islice(items, 100))]
    named: Mapping[str, Any] = {}
    with suppress(Exception):  # of a `__getattribute__` of the script
        named = dict(vars(thing))
    shown = [name for name in islice(named, MAX_ITEMS) if not (issubclass(kind, type) and name.startswith("__"))]
    return [(f".{name}", named[name]) for name in shown]
