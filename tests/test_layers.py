"""Imports and cimports go downward: each module stands on a numbered layer and uses its own or lower ones.

An import inside a function counts like one at the top. Only the package's face, which loads its public names when
they are asked for, and the command line may reach for anything from inside a function.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import freetoken

PACKAGE = Path(next(iter(freetoken.__path__)))

# "" is freetoken/__init__.py itself.
LAYERS: list[set[str]] = [
    {"errors", "settings", "units"},
    {"cgroup", "crowding", "demo", "topology"},
    {"memory"},
    {"formats"},
    {"kernels"},
    {"banks", "checkpoint"},
    {"executor"},
    {"device", "duties", "rows"},
    {"cache", "gpu"},
    {"bandwidth", "offload", "planner"},
    {"decode"},
    {"fidelity", "info", "integration", "model_report"},
    {"", "__main__", "cli"},
]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
LAZY = {"", "cli"}
"""Units whose functions may import anything."""

CORE = LEVEL["integration"]
"""Below this layer nothing imports the packages named here, except the units that exist for one of them."""
KEPT_OUT = {"transformers": set[str](), "triton": {"gpu"}, "cuda": {"device"}}

CIMPORT = re.compile(
    r"""^[ \t]* (?: from [ \t]+ ([\w.]+) [ \t]+ c?import [ \t]+ (\([^)]*\) | [^\n]*) | c?import [ \t]+ ([^\n]*) )""",
    re.MULTILINE | re.VERBOSE,
)


def split_names(text: str) -> list[str]:
    """The names of "(a, b as c)  # why", without what they are called locally."""
    bare = re.sub(r"#[^\n]*", "", text).strip(" \t\n()\\")
    return [name.split()[0] for name in bare.split(",") if name.strip()]


def absolute(module: str | None, level: int, package: str) -> str:
    """The dotted name of what `from ..module import` means inside `package`."""
    if not level:
        return module or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def read_python(source: str, package: str, *, lazy: bool) -> Iterator[str]:
    """Dotted names that Python code imports; with `lazy`, without those inside functions."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != PACKAGE.name or alias.asname)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE.name:
            # `import freetoken` is what is then used of it
            yield f"{PACKAGE.name}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node.module, node.level, package)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module"):
            # as much of the name as stands there: import_module(f"freetoken.kernels.{name}")
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.rstrip(".")
        pending.extend(ast.iter_child_nodes(node))


def read_cython(source: str, package: str) -> Iterator[str]:
    """Dotted names that Cython code imports or cimports."""
    for match in CIMPORT.finditer(source):
        origin, names, plain = match.groups()
        if origin:
            module = origin.lstrip(".")
            module = absolute(module, len(origin) - len(module), package)
            yield from (f"{module}.{name}" for name in split_names(names))
        else:
            yield from split_names(plain)


def unit_of(name: str) -> str | None:
    """The unit that a dotted name belongs to: "formats" for freetoken.formats.bf16; None outside the package.

    `from freetoken import __version__` is nobody's business.
    """
    root, _, rest = name.partition(".")
    unit = rest.split(".")[0]
    if root != PACKAGE.name or (unit.startswith("__") and unit not in LEVEL):
        return None
    return unit


def check_import(unit: str, name: str, package: Path) -> str | None:
    """What is wrong with a unit importing a dotted name, or None."""
    root = name.split(".")[0]
    if root in KEPT_OUT and LEVEL[unit] < CORE and unit not in KEPT_OUT[root]:
        return f"imports {root}, which belongs in freetoken.integration"
    target = unit_of(name)
    if target is None:
        return None
    if target not in LEVEL:
        if (package / target).is_dir() or list(package.glob(f"{target}.*")):
            return None  # reported once, where that module is
        target = ""  # a name of the package's face
    if LEVEL[target] > LEVEL[unit]:
        return f"is on layer {LEVEL[unit]} and imports {name}, which is on layer {LEVEL[target]}"
    return None


def find_faults(package: Path) -> list[str]:
    """One line for each import that goes up, each cycle and each module without a layer."""
    faults: list[str] = []
    graph: dict[str, set[str]] = {unit: set() for unit in LEVEL}
    for file in sorted(file for file in package.rglob("*") if file.suffix in (".py", ".pyi", ".pyx", ".pxd")):
        place = file.relative_to(package)
        unit = place.parts[0].split(".")[0]
        unit = "" if unit == "__init__" else unit
        if unit not in LEVEL:
            faults.append(f"{place} has no layer: add {unit!r} to LAYERS in {Path(__file__).name}")
            continue
        dotted = ".".join([PACKAGE.name, *place.parts[:-1]])
        source = file.read_text(encoding="utf-8")
        is_cython = file.suffix in (".pyx", ".pxd")
        names = set(read_cython(source, dotted) if is_cython else read_python(source, dotted, lazy=unit in LAZY))
        for name in sorted(names):
            fault = check_import(unit, name, package)
            if fault:
                faults.append(f"{place} {fault}")
            target = unit_of(name)
            if target in LEVEL and target != unit:
                graph[unit].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append("modules import each other: " + " -> ".join(unit or "freetoken" for unit in error.args[1]))
    return faults


def test_imports_of_the_package_go_downward() -> None:
    assert find_faults(PACKAGE) == []


BAD = [
    pytest.param("errors.py", "from freetoken import topology", "layer 0 and imports freetoken.topology", id="up"),
    pytest.param("memory/a.py", "from ..kernels import _isa", "imports freetoken.kernels._isa", id="relative"),
    pytest.param("formats/a.py", "def f():\n    import freetoken.kernels", "layer 4", id="inside a function"),
    pytest.param("formats/a.pyi", "from freetoken.kernels._isa import T", "layer 4", id="stub"),
    pytest.param("formats/_a.pyx", "from freetoken.kernels._isa cimport x", "layer 4", id="cimport"),
    pytest.param("formats/_a.pxd", "  cimport freetoken.kernels._isa as i", "layer 4", id="plain cimport"),
    pytest.param("formats/_a.pyx", "from freetoken cimport (\n    kernels, # why\n)", "layer 4", id="in parentheses"),
    pytest.param("formats/a.py", "import_module(f'freetoken.kernels.{x}')", "layer 4", id="by name"),
    pytest.param("executor.py", "from freetoken import load", f"layer {LEVEL['']}", id="the package's face"),
    pytest.param("info.py", "import freetoken\nfreetoken.load()", f"layer {LEVEL['']}", id="attribute of the face"),
    pytest.param("executor.py", "def f():\n    import transformers.utils", "imports transformers", id="transformers"),
    pytest.param("cache.py", "from triton import jit", "imports triton", id="triton"),
    pytest.param("__init__.py", "import freetoken.novel", None, id="a name of the face"),
    pytest.param("novel/a.py", "", "add 'novel' to LAYERS", id="unknown module"),
]


@pytest.mark.parametrize(("file", "source", "fault"), BAD)
def test_checker_sees(tmp_path: Path, file: str, source: str, fault: str | None) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source + "\n")

    found = find_faults(tmp_path)

    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_checker_sees_modules_that_import_each_other(tmp_path: Path) -> None:
    (tmp_path / "cache.py").write_text("import freetoken.gpu\n")
    (tmp_path / "gpu.py").write_text("import freetoken.cache\n")

    assert find_faults(tmp_path)[0].startswith("modules import each other")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("executor.py", "import numpy\nfrom freetoken.kernels import _isa\nfrom freetoken import __version__"),
        ("cli.py", "def main():\n    import transformers\n    import freetoken.integration"),
        ("__init__.py", "def __getattr__(name):\n    from freetoken.integration import load"),
        ("kernels/_a.pyx", "from freetoken.kernels._isa cimport a, b as c\nfrom libc.math cimport expf"),
        ("gpu/gemv.py", "import triton"),
        ("info.py", "import freetoken\nprint(freetoken.__version__)"),
        ("integration/a.py", "from transformers import PreTrainedModel"),
    ],
)
def test_checker_allows(tmp_path: Path, file: str, source: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source + "\n")

    assert find_faults(tmp_path) == []
