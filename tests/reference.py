"""Write docs/options.md and docs/reference.md from the declarations in the source: python tests/reference.py."""

import inspect
import re
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
        argument = f"`{name}`" if name in defaults else ""
        flag = f"`{name_flag(name)}{' ' if option.metavar else ''}{option.metavar}`"
        rows.append(f"| {argument} | {flag} | {shown} | {option.help}.{identity} |")
    return f"""\
# Options

You can set an option as an argument of `Run`, on the command line of `samestep launch`, `train` and `slurm`, or by an
environment variable such as `{PREFIX}BATCH_SIZE`. The command line and the variable replace the argument in the script.
Some options have no argument of `Run`. A run keeps its value of each option marked **Identity**: a start with another
value is an error.

{chr(10).join(rows)}
"""


MADE_BY_RUN = ("Step", "Epoch", "TrackerInfo", "Tracker", "Source")  # Their constructors are not public.
# Left out of signatures: other modules than torch, and the mark of type variables.
MODULES = re.compile(r"\b(?:collections\.abc|contextlib|pathlib|typing|samestep(?:\.[a-z]\w*)+)\.|~(?=T\b)")
INTERNAL = {
    "Step": (
        "loaded_fingerprint", "fingerprint", "gradient_checksum", "compute", "load_up_to",
        "refuse_inside", "check_not_left",
    )
}  # fmt: skip


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
    parts = [f"## {name}", _body("" if name in MADE_BY_RUN else name, thing)]
    if inspect.isclass(thing):
        for method, member in vars(thing).items():
            is_shown = not method.startswith("_") and method not in INTERNAL.get(name, ()) and inspect.getdoc(member)
            if is_shown and callable(member):
                parts += [f"### {name}.{method}", _body(f"{name}.{method}", member)]
            elif is_shown and isinstance(member, property):
                parts += [f"### {name}.{method}", _body("", member)]
    return parts


def _body(name: str, thing: Any) -> str:
    """The docstring, below the signature unless `name` is empty."""
    lines = [f"{name}{_format_signature(inspect.signature(thing))}", ""] if name else []
    return "\n".join(["```text", *lines, str(inspect.getdoc(thing)), "```"])


def _format_signature(signature: inspect.Signature) -> str:
    """On one line if it is short, otherwise with a line per parameter."""
    shown = signature.replace(parameters=[each for each in signature.parameters.values() if each.name != "self"])
    if len(text := _shorten(str(shown))) <= 100:
        return text
    lines: list[str] = []
    kind = None
    for each in shown.parameters.values():
        if each.kind is each.KEYWORD_ONLY and kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            lines.append("*")
        elif kind is each.POSITIONAL_ONLY and each.kind is not kind:
            lines.append("/")
        lines.append(_shorten(str(each)))
        kind = each.kind
    result = shown.return_annotation
    returns = "" if result is shown.empty else f" -> {_shorten(inspect.formatannotation(result))}"
    return "".join(["(\n", *(f"    {line},\n" for line in lines), ")", returns])


def _shorten(text: str) -> str:
    return MODULES.sub("", text).replace("torch.nn.modules.module.", "torch.nn.")


if __name__ == "__main__":
    (DOCS / "options.md").write_text(build_options())
    (DOCS / "reference.md").write_text(build_reference())
