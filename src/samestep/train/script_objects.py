"""The objects that a script's variables refer to."""

import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from samestep.train.generators import NUMPY_GENERATOR, PYTHON_GENERATOR

MAX_DEPTH = 4
MAX_LOOKS = 20_000


def find_things(
    roots: Mapping[str, Any], is_wanted: Callable[[Any], bool], max_looks: int = MAX_LOOKS
) -> dict[str, Any]:
    """Return the wanted objects that are reachable from `roots` and from the script's variables: path -> object.

    These are the variables of the script's modules and of the running functions. The global generators are omitted,
    because samestep seeds them.
    """
    things: list[tuple[str, Any, int]] = [(name, root, 0) for name, root in roots.items()]
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != "samestep":
            things += [(name, value, 0) for name, value in frame.f_locals.items() if not name.startswith("__")]
        frame = frame.f_back
    main = vars(sys.modules["__main__"])
    things += [(name, value, 0) for name, value in main.items() if not name.startswith("__")]
    modules = _find_own_modules(Path.cwd(), len(sys.modules))
    for module in modules:
        own = vars(module).items()
        things += [(f"{module.__name__}.{name}", value, 0) for name, value in own if not name.startswith("__")]
    homes = {"__main__", *(module.__name__ for module in modules)}
    found: dict[str, Any] = {}
    seen = {id(PYTHON_GENERATOR), id(NUMPY_GENERATOR), id(torch.default_generator)}
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


@lru_cache(maxsize=1)
def _find_own_modules(place: Path, num_modules: int) -> list[ModuleType]:
    """Return the script's modules except `__main__`: those in files below its directory or `place`, not in a library.

    Args:
        num_modules: total number of imported modules, so that the cached result is renewed after further imports.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    places = [place] if main is None else [place, Path(main).absolute().parent]
    homes = tuple(f"{home}{os.sep}" for each in places for home in (each, each.resolve()))
    libraries = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", sysconfig.get_path("stdlib"))
    found = []
    others = {"__main__", "samestep"}
    for name, module in [*sys.modules.items()]:
        root = name.partition(".")[0]
        if root in others:
            continue
        file = getattr(module, "__file__", None) or ""
        if file.startswith(homes) and file.endswith(".py") and not any(each in file for each in libraries):
            found.append(module)
        elif name == root and file:  # nor are the modules of this package, of which torch alone has 1,500
            others.add(root)
    return found


def look_into(thing: Any) -> list[tuple[str, Any]]:
    """Return the contents of an object with path suffixes: attributes and items."""
    if type(thing).__module__.partition(".")[0] == "samestep" or isinstance(thing, ModuleType | torch.Tensor):
        return []
    if isinstance(thing, type):
        return [(f".{name}", value) for name, value in vars(thing).items() if not name.startswith("__")]
    if isinstance(thing, dict):
        return [(f"[{key!r}]", value) for key, value in list(thing.items())[:1000]]
    if isinstance(thing, list | tuple):
        return [(f"[{i}]", value) for i, value in enumerate(thing[:100])]
    attributes = getattr(thing, "__dict__", None)
    named = list(attributes.items())[:1000] if isinstance(attributes, Mapping) else []
    return [(f".{name}", value) for name, value in named]
