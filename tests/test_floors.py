"""The house rules, checked in the source: floors and rooms, where the environment is read and collectives are called,
size, names, and the cost of `import samestep`. To change a rule, change it here, with the reason.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "samestep"

# The floor of each package of src/samestep (a room) and of each module at its top. A module imports
# floors below its own, and its own room. errors, which all raise, and cli, which names
# recipes, have their own floors.
FLOORS = {
    "version": 0,
    "errors": 0,
    "files": 0,
    "processes": 0,
    "redaction": 0,
    "console": 0,
    "torch_internals": 0,
    "config": 1,
    "plan": 1,
    "data": 2,
    "world": 2,
    "engine": 3,
    "watch": 3,
    "launch": 3,
    "sources": 3,
    "snapshot": 4,
    "train": 5,
    "tools": 5,
    "recipes": 6,
    "adapters": 6,
    "cli": 7,
    "__main__": 8,
}

ENVIRONMENT = "world/environment.py"
COLLECTIVE_ROOMS = ("world/", "engine/", "snapshot/", "tools/doctor/")
COLLECTIVES = re.compile(
    r"all_reduce\w*|_?all_gather\w*|_?reduce_scatter\w*|all_to_all\w*|_?broadcast\w*|reduce|gather|gather_object|scatter"
    r"|scatter_object_list|(monitored_)?barrier|i?send|i?recv|(send|recv)_object_list|batch_isend_irecv|P2POp"
)
# Names of methods that only a ProcessGroup has.
GROUP_METHODS = re.compile(r"_?all_?gather_\w+|_?(allgather|allreduce|alltoall|reduce_scatter)\w*|recv_anysource")

MAX_FUNCTION_LINES = 80

# Files and JSON are read and written by files.py, which follows no link, blocks on no FIFO, limits sizes and replaces
# files atomically. Module, or its package with "/" -> what it may do itself, and why.
FILE_EXCEPTIONS: dict[str, tuple[str, str]] = {
    "files.py": ("all", "it is that place"),
    "recipes/": ("all", "scripts, as users write them, whose data set is trusted"),
    "sources/": ("all", "the data set is trusted, and may be links"),
    "data/source.py": ("all", "the data set is trusted, and may be links"),
    "adapters/": ("all", "what the adapted library writes"),
    "tools/report/page.py": ("read_text", "files of this package"),
    "tools/report/run_data.py": ("json.loads", "rows of metrics, whose values are checked: three times as fast"),
    "tools/verify/plain.py": ("copy2 copytree", "the working directory, with what its links name"),
    "tools/traced_script.py": ("json.loads", "lines of a trace in a directory of the tool"),
    "snapshot/store.py": ("json.load", "a state of any size and depth, whose damage is an error"),
    "train/tracing.py": ("json.loads", "a variable of the environment"),
    "launch/rank_process.py": ("json.loads", "a variable of the environment"),
    "world/environment.py": ("open json.loads", "the null device; variables of the environment"),
    "launch/forkserver.py": ("open", "the null device"),
    "world/workdir.py": ("open", "read_private: relative to a directory that it has checked"),
    "launch/output_recorder.py": ("open", "a descriptor that it has opened so"),
    "world/wire.py": ("json.loads", "messages of ranks"),
    "world/rendezvous_store.py": ("json.loads", "messages of ranks"),
    "watch/heartbeat.py": ("json.loads", "signed messages of ranks"),
}
FILE_METHODS = ("read_text", "read_bytes", "write_text", "write_bytes")

# Part of a name -> what to use instead.
BANNED_NAMES = {
    r"utils?": "a noun that says what is in it",
    r"Manager": "what it is, not that it manages",
    r"Base(?![a-z])\w*": "the thing itself; the plainest one is the base",
    r"iterations?|num_iters?": "step",
    r"sub_?batch|minibatch": "micro_batch",
    r"global_?batch(_size)?|effective_?batch(_size)?": "batch",
}


@dataclass(frozen=True)
class Module:
    """A source file. `path` is relative to src/samestep."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def name(self) -> str:
        """The full name, such as "samestep.plan.tree". `__init__.py` has the name of its package."""
        return ".".join(["samestep", *self.path.removesuffix(".py").removesuffix("__init__").split("/")]).strip(".")

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"src/samestep/{self.path}:{node.lineno}"


def write(node: ast.expr) -> str:
    """Return what ast.unparse does; fast for names and attributes of names."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{write(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def read_modules() -> list[Module]:
    files = sorted(SOURCE.rglob("*.py"))
    assert files, f"no source at {SOURCE}"
    return [Module(str(file.relative_to(SOURCE)), file.read_text()) for file in files]


MODULES = read_modules()
KNOWN = {module.name for module in MODULES}


def read_exports() -> dict[str, str]:
    """Public name of `samestep` -> the module that holds it."""
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_EXPORTS":
            return {str(key): str(value) for key, value in ast.literal_eval(node.value).items()}
    raise AssertionError("samestep/__init__.py has no _EXPORTS")


EXPORTS = read_exports()


def resolve(name: str) -> str:
    """Return the module of a name: "samestep.train.run" for "samestep.Run"."""
    first, _, public = name.partition(".")
    return EXPORTS.get(public.split(".")[0], name) if first == "samestep" else name


def imports(module: Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield every import as a full name, including those for types only and inside functions."""
    package = module.name.split(".") if module.path.endswith("__init__.py") else module.name.split(".")[:-1]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names if alias.name != "samestep")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, node.module] if node.module else above)
            yield from ((node, resolve(f"{origin}.{alias.name}")) for alias in node.names)
        elif isinstance(node, ast.Attribute) and write(node.value) == "samestep":
            yield node, resolve(f"samestep.{node.attr}")
        elif isinstance(node, ast.Call) and write(node.func).endswith(("import_module", "__import__")):
            yield from ((node, a.value) for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def find_floor_faults(module: Module) -> list[str]:
    if module.path == "__init__.py":  # names others, and loads them on first use
        return [
            f"{module.at(node)}: {ast.unparse(node)!r} is imported at once; put it into _EXPORTS"
            for node in module.tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            and "samestep" in ast.unparse(node)
            and ast.unparse(node) != "from samestep.version import __version__"
        ]
    if module.room not in FLOORS:
        return [f"src/samestep/{module.path}: {module.room!r} stands on no floor; give it one in FLOORS"]
    floor = FLOORS[module.room]
    faults = []
    for node, name in imports(module):
        first, *rest = name.split(".")
        if first != "samestep" or not rest or rest[0] == module.room:
            continue
        if rest[0] not in FLOORS:
            faults.append(f"{module.at(node)}: imports {name}, which stands on no floor")
        elif FLOORS[rest[0]] >= floor:
            where = "on the same floor" if FLOORS[rest[0]] == floor else f"above, on floor {FLOORS[rest[0]]}"
            faults.append(
                f"{module.at(node)}: {module.room} (floor {floor}) imports {name}, which stands {where}; "
                "let a module of a floor above join the two, or hand the value in"
            )
    return faults


def find_environment_faults(module: Module) -> list[str]:
    """Uses of os.environ outside its one reader.

    To start a child, a launcher takes a copy from `world.environment.child_variables()`, adds to that and passes it on.
    In launch/ alone os.environ may be written (assigned to, deleted from, updated, cleared): a rank of a forkserver
    begins with the environment of the server, and replaces it first.
    """
    if module.path == ENVIRONMENT:
        return []
    written = {
        id(node.value)
        for node in module.nodes
        if module.path.startswith("launch/")
        if (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del))
        or (isinstance(node, ast.Attribute) and node.attr in ("update", "clear"))
    }
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    faults: list[tuple[ast.stmt | ast.expr, str]] = []
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in names and write(node.value) == "os":
            if id(node) not in written:
                faults.append((node, f"os.{node.attr}"))
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            faults += [(node, alias.name) for alias in node.names if alias.name in names]
        elif isinstance(node, ast.Import):
            faults += [(node, f"os as {a.asname}") for a in node.names if a.name == "os" and a.asname]
    return [
        f"{module.at(node)}: {what} outside world/environment.py; read it there, once, into a frozen value"
        for node, what in faults
    ]


def find_collective_faults(module: Module) -> list[str]:
    if module.path.startswith(COLLECTIVE_ROOMS):
        return []
    aliases = {"torch.distributed"}
    faults: list[tuple[ast.stmt | ast.expr, str]] = []
    for node in module.nodes:
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name.startswith("torch.distributed") and a.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if node.module == "torch" and alias.name == "distributed":
                    aliases.add(alias.asname or alias.name)
                elif f"{node.module}.{alias.name}".startswith("torch.distributed.") and (
                    COLLECTIVES.fullmatch(alias.name) or alias.name in ("_functional_collectives", "functional")
                ):
                    faults.append((node, alias.name))
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            of_torch = COLLECTIVES.fullmatch(node.attr) and write(node.value) in aliases
            if of_torch or GROUP_METHODS.fullmatch(node.attr):
                faults.append((node, ast.unparse(node)))
    return [
        f"{module.at(node)}: {what} outside {', '.join(COLLECTIVE_ROOMS)}; ranks that disagree on who calls "
        "what hang, so add it to world/group.py (objects, whole tensors) or to engine/, and call that"
        for node, what in faults
    ]


def find_size_faults(module: Module) -> list[str]:
    faults = []
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                faults.append(f"{module.at(node)}: {node.name} has {num_lines} lines, more than {MAX_FUNCTION_LINES}")
    return faults


def find_name_faults(module: Module) -> list[str]:
    named: list[tuple[str, str]] = [(f"src/samestep/{module.path}", part) for part in module.name.split(".")[1:]]
    for node in module.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            named.append((module.at(node), node.name))
        elif isinstance(node, ast.arg):
            named.append((f"src/samestep/{module.path}:{node.lineno}", node.arg))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            named.append((module.at(node), node.id if isinstance(node, ast.Name) else node.attr))
    return [
        f"{place}: {name!r}; call it {instead}"
        for place, name in named
        for banned, instead in BANNED_NAMES.items()
        if re.search(rf"(^|_|(?<=[a-z0-9])(?=[A-Z]))({banned})($|_|(?=[A-Z]))", name)
    ]


def find_model_faults(module: Module) -> list[str]:
    """Imports of a recipe's model beyond torch and Python's own: a user copies the file."""
    if not module.path.startswith("recipes/models/"):
        return []
    named: list[tuple[ast.stmt | ast.expr, str]] = []
    for node in module.nodes:
        if isinstance(node, ast.Import):
            named += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named.append((node, "." * node.level + (node.module or "")))
    return [
        f"{module.at(node)}: imports {name}; a model imports torch only"
        for node, name in named
        if (first := name.split(".")[0]) != "torch" and first not in sys.stdlib_module_names
    ]


def find_file_faults(module: Module) -> list[str]:
    """Calls that open files without `open_regular`, or parse JSON without the limits of `parse_json`."""
    allowed = " ".join(what for path, (what, _) in FILE_EXCEPTIONS.items() if module.path.startswith(path)).split()
    calls = [node for node in module.nodes if isinstance(node, ast.Call)]
    return [
        f"{module.at(call)}: {what}; use files.py: read_bytes, replace_file, copy_file, parse_json, or open_regular"
        for call in calls
        if (what := _name_file_access(call)) and not {what, "all"} & {*allowed}
    ]


def _name_file_access(call: ast.Call) -> str:
    """Return the name of a function that accesses a file without checks; "" for other calls."""
    name = write(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "open":
        return "" if keywords.get("opener") == "open_regular" else name
    if name in ("json.load", "json.loads"):
        return name
    if re.fullmatch(r"shutil\.(copy|copy2|copyfile|copytree|move)", name):
        return "" if keywords.get("symlinks") == "True" else name.removeprefix("shutil.")
    last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if last == "open":  # of a Path: Image.open and Reducer.open take other arguments
        mode = ast.unparse(call.args[0]) if call.args else ""
        return "open" if re.fullmatch(r"'[rwax][bt+]*'", mode) or {"mode", "encoding"} & {*keywords} else ""
    return last if last in FILE_METHODS else ""


RULES: dict[str, Callable[[Module], list[str]]] = {
    "a module imports floors below its own, and its own room": find_floor_faults,
    "the environment is read in world/environment.py alone": find_environment_faults,
    "collectives are called in a few rooms alone": find_collective_faults,
    "functions are short": find_size_faults,
    "names say what a thing is": find_name_faults,
    "a recipe's model imports torch only": find_model_faults,
    "files are opened and parsed in files.py alone": find_file_faults,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_holds(rule: str) -> None:
    faults = [fault for module in MODULES for fault in RULES[rule](module)]
    assert not faults, "\n".join([f"{rule}, but:", *faults])


def find_cycles(modules: Sequence[Module]) -> list[tuple[str, ...]]:
    """Import cycles, as sorted module names: imports for types only and inside functions count, too."""
    known = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        named = {name for _, name in imports(module)}
        graph[module.name] = {n if n in known else n.rpartition(".")[0] for n in named} & known - {module.name}

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [*graph[start]]
        while stack:
            if (name := stack.pop()) not in seen:
                seen.add(name)
                stack += graph[name]
        return seen

    reached = {name: reach(name) for name in graph}
    in_cycles = {name for name in graph if name in reached[name]}
    return sorted({tuple(sorted(n for n in in_cycles if n in reached[m] and m in reached[n])) for m in in_cycles})


def test_no_module_imports_itself_through_others() -> None:
    found = find_cycles(MODULES)
    assert not found, f"import cycles: {found}: move what the modules share into a module of its own"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import samestep.train.b", "b": "def f():\n    from samestep.train import a"}, [("a", "b")]),
        ({"a": "if TYPE_CHECKING:\n    from samestep.train.b import X", "b": "from .a import Y"}, [("a", "b")]),
        ({"a": "from samestep.train.b import X", "b": "import math"}, []),
    ],
)
def test_the_search_for_cycles_sees(sources: dict[str, str], expected: list[tuple[str, ...]]) -> None:
    modules = [Module(f"train/{name}.py", source) for name, source in sources.items()]
    assert find_cycles(modules) == [tuple(f"samestep.train.{name}" for name in cycle) for cycle in expected]


def test_no_two_modules_have_one_name() -> None:
    """Packages, too: tracebacks and tabs of editors show the last part only."""
    names = [module.name.rpartition(".")[2] for module in MODULES]
    assert sorted({name for name in names if names.count(name) > 1}) == []


# Accesses to `_private` attributes of other modules' objects: those of other packages' objects are listed, and
# there are none of samestep's. Counts may only fall.
KNOWN_PRIVATE = {
    "adapters/lightning.py": 1,  # the name of the hyperparameters in a checkpoint of Lightning
    "adapters/lightning_metrics.py": 3,  # what torchmetrics itself uses to reduce the states of a metric over processes
    "launch/rank_process.py": 3,  # a process that ends without the teardown of its modules
    "snapshot/serialization.py": 1,  # `_metadata` of a state_dict, which torch documents
    "tools/verify/fixed.py": 2,  # the sources of random numbers that a trial replaces
}
PUBLIC = ("_replace", "_asdict", "_fields")  # of a NamedTuple


def find_private_uses(module: Module) -> list[str]:
    """Uses of `x._name` where neither the module's own objects (self, cls) nor its functions have that name.

    Private names of torch are used in torch_internals.py.
    """
    if module.path == "torch_internals.py":
        return []
    own = {
        node.attr for node in module.nodes if isinstance(node, ast.Attribute) and write(node.value) in ("self", "cls")
    }
    own |= {node.name for node in module.nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return [
        f"{module.at(node)}: {ast.unparse(node)}"
        for node in module.nodes
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in own
        if node.attr not in PUBLIC
        if write(node.value).split(".")[0] not in ("torch", "dist", "os", "sys", "self", "cls")
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.path)
def test_no_module_uses_private_attributes_of_other_modules_objects(module: Module) -> None:
    uses = find_private_uses(module)
    assert len(uses) <= KNOWN_PRIVATE.get(module.path, 0), "\n".join(["pass what is needed, or make it public:", *uses])


def test_private_uses_are_seen() -> None:
    assert len(find_private_uses(Module("train/x.py", "def f(run):\n    run._loop._step\n    run.__dict__"))) == 2
    assert not find_private_uses(Module("train/x.py", "def f(self, x):\n    self._a = x._a\n    torch._C.f()"))


@pytest.mark.parametrize("name", ["samestep", "samestep.cli"])
def test_importing_it_does_not_import_torch(name: str) -> None:
    script = f"import sys, {name}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n", (
        f"import {name} imports torch: do that inside the function that needs it (-X importtime shows where)"
    )


@pytest.mark.parametrize("module", sorted(set(EXPORTS.values())))
def test_what_samestep_exports_has_a_module(module: str) -> None:
    assert module in KNOWN, f"_EXPORTS of samestep/__init__.py names {module}, which is not there"


FAULTY = [
    ("watch/x.py", "from samestep.engine.reducer import Reducer", find_floor_faults),
    ("watch/x.py", "import samestep.snapshot", find_floor_faults),
    ("plan/x.py", "from ..world import group", find_floor_faults),
    ("plan/x.py", "from .. import Run", find_floor_faults),
    ("data/x.py", "def f():\n    from samestep.world.group import Group", find_floor_faults),
    ("train/x.py", "import samestep\nsamestep.cli.main()", find_floor_faults),
    ("launch/x.py", "from samestep import Run", find_floor_faults),
    ("launch/x.py", "importlib.import_module('samestep.train.run')", find_floor_faults),
    ("recipes/x.py", "import samestep.cli", find_floor_faults),
    ("helpers/x.py", "", find_floor_faults),
    ("recipes/models/x.py", "import torch\nimport numpy as np", find_model_faults),
    ("recipes/models/x.py", "import samestep", find_model_faults),
    ("__init__.py", "from samestep.errors import Error", find_floor_faults),
    ("train/x.py", "import os\nos.environ.get('RANK')", find_environment_faults),
    ("train/x.py", "import os\nos.environ['A'] = 'b'", find_environment_faults),
    ("train/x.py", "from os import getenv", find_environment_faults),
    ("train/x.py", "import os as system", find_environment_faults),
    ("launch/x.py", "import os\nos.environ['RANK']", find_environment_faults),
    ("launch/x.py", "import os\nenv = dict(os.environ)", find_environment_faults),
    ("train/x.py", "import torch\ntorch.distributed.broadcast(x, 0)", find_collective_faults),
    ("train/x.py", "import torch.distributed as dist\nreduce = dist.all_reduce", find_collective_faults),
    ("train/x.py", "from torch import distributed\ndistributed.barrier()", find_collective_faults),
    ("train/x.py", "from torch.distributed import all_gather_object", find_collective_faults),
    ("train/x.py", "from torch.distributed.nn import functional", find_collective_faults),
    ("train/x.py", "group.allgather([x], [y])", find_collective_faults),
    ("plan/x.py", "def f():\n" + "    x = 1\n" * 80, find_size_faults),
    ("plan/utils.py", "", find_name_faults),
    ("plan/io_util.py", "", find_name_faults),
    ("plan/x.py", "class RunManager: ...", find_name_faults),
    ("plan/x.py", "class BaseRun: ...", find_name_faults),
    ("plan/x.py", "def f(global_batch_size): ...", find_name_faults),
    ("plan/x.py", "self.iteration = 0", find_name_faults),
    ("tools/x.py", "open(path)", find_file_faults),
    ("tools/x.py", "open(path, 'w', opener=other)", find_file_faults),
    ("tools/x.py", "path.open('rb')", find_file_faults),
    ("tools/x.py", "(a / 'b').write_text(text)", find_file_faults),
    ("tools/x.py", "path.read_bytes()", find_file_faults),
    ("tools/x.py", "shutil.copytree(a, b)", find_file_faults),
    ("tools/x.py", "json.load(file)", find_file_faults),
    ("world/wire.py", "open(path)", find_file_faults),
]

SOUND = [
    (
        "watch/x.py",
        "from samestep import Error\nfrom samestep.version import __version__\nfrom . import metrics",
        find_floor_faults,
    ),
    ("recipes/x.py", "import samestep\nsamestep.Run(None)", find_floor_faults),
    ("recipes/models/x.py", "import math\nfrom torch.utils import checkpoint", find_model_faults),
    (
        "launch/x.py",
        "import os\nos.environ['A'] = 'b'\nos.environ.update(a)\nos.getpid()",
        find_environment_faults,
    ),
    (ENVIRONMENT, "import os\nos.environ['A']", find_environment_faults),
    (
        "train/x.py",
        "group.gather(x)\nx.scatter(0, i, y)\nsock.send(b'')\nimport functools",
        find_collective_faults,
    ),
    ("train/x.py", "import torch.distributed as dist\ndist.is_initialized()", find_collective_faults),
    ("engine/x.py", "import torch.distributed as dist\ndist.all_reduce(x)", find_collective_faults),
    ("tools/x.py", "open(path, 'rb', opener=open_regular)\nos.open(path, 0)\nImage.open(file)", find_file_faults),
    ("tools/x.py", "read_bytes(path)\nshutil.copytree(a, b, symlinks=True)\njson.dumps(x)", find_file_faults),
    ("world/wire.py", "json.loads(text)", find_file_faults),
    (
        "plan/x.py",
        "from torch.utils.data import DataLoader\nexcept_baseline = based = BASE = 1",
        find_name_faults,
    ),
]


@pytest.mark.parametrize(("path", "source", "rule"), FAULTY)
def test_the_rule_sees(path: str, source: str, rule: Callable[[Module], list[str]]) -> None:
    assert rule(Module(path, source))


@pytest.mark.parametrize(("path", "source", "rule"), SOUND)
def test_the_rule_lets_through(path: str, source: str, rule: Callable[[Module], list[str]]) -> None:
    assert rule(Module(path, source)) == []
