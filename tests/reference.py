"""Writes docs/options.md and docs/reference.md from the declarations in the source: python tests/reference.py."""

import inspect
from pathlib import Path
from typing import Any

import samestep
from samestep.config import OPTIONS, PREFIX, RunConfig, name_flag

DOCS = Path(__file__).parents[1] / "docs"


def build_options() -> str:
    """The table of options."""
    defaults = {name: each.default for name, each in inspect.signature(samestep.Run.__init__).parameters.items()}
    rows = [
        "| argument of `Run` | command line | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, option in OPTIONS.items():
        default = defaults.get(name, getattr(RunConfig, name, None))
        shown = "" if default is inspect.Parameter.empty else f"`{default!r}`"
        identity = " **Identity.**" if option.is_identity else ""
        argument = f"`{name}`" if option.is_argument else ""
        flag = f"`{name_flag(name)}{' ' if option.metavar else ''}{option.metavar}`"
        rows.append(f"| {argument} | {flag} | {shown} | {option.help}.{identity} |")
    return f"""\
# Options

An option on the command line of `samestep launch`, `train` and `submit`, or in an environment variable such as
`{PREFIX}BATCH_SIZE`, replaces the argument in the script. Options without an argument of `Run` exist on the command
line and as environment variables only. A run directory belongs to one value of each option marked **Identity**.

{chr(10).join(rows)}
"""


def build_reference() -> str:
    """The docstrings of all public objects."""
    parts = ["# API reference", "Everything below is importable from `samestep`."]
    for name in samestep.__all__:
        if name != "__version__":
            parts += _describe(name, getattr(samestep, name))
    return "\n\n".join(parts) + "\n"


def _describe(name: str, thing: Any) -> list[str]:
    if inspect.isclass(thing) and issubclass(thing, Exception):
        bases = ", ".join(base.__name__ for base in thing.__bases__)
        return [f"## {name}", f"```text\n{name}({bases})\n\n{inspect.getdoc(thing)}\n```"]
    parts = [f"## {name}", *_body(name, thing)]
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            if not method.startswith("_") and callable(function):
                parts += [f"### {name}.{method}", *_body(f"{name}.{method}", function)]
            elif isinstance(function, property) and not method.startswith("_"):
                parts += [f"### {name}.{method}", f"```text\n{inspect.getdoc(function)}\n```"]
    return parts


def _body(name: str, thing: Any) -> list[str]:
    signature = str(inspect.signature(thing)).replace("(self, ", "(").replace("(self)", "()")
    if len(signature) > 100:
        parameters = [str(each) for each in inspect.signature(thing).parameters.values() if each.name != "self"]
        signature = "(\n    " + ",\n    ".join(parameters) + ",\n)"
    return [f"```text\n{name}{signature}\n\n{inspect.getdoc(thing)}\n```"]


if __name__ == "__main__":
    (DOCS / "options.md").write_text(build_options())
    (DOCS / "reference.md").write_text(build_reference())
