"""Imports run one way: search > profiling > runtime > kernels | artifacts."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW: dict[str, set[str]] = {
    "kernels": set(),
    "artifacts": set(),
    "runtime": {"kernels", "artifacts"},
    "profiling": {"runtime", "kernels", "artifacts"},
    "search": {"profiling", "runtime", "kernels", "artifacts"},
}
# Needed by some calls only: a serving process imports runtime without them.
HEAVY = {"optuna", "matplotlib", "transformers", "triton", "vllm"}
# What knows of vLLM: the plugin, and the command that measures it.
ENGINE_ROOM = ("runtime/vllm/", "profiling/first_token.py")
LIGHT_PACKAGES = {"runtime", "kernels", "artifacts"}
# A room of its own for each heavy library: the module is imported lazily, and holds nothing but its code.
HEAVY_ROOMS = {
    "kernels/attention/triton_kernel.py": {"triton"},
    "kernels/attention/triton_loops.py": {"triton"},
    "kernels/attention/triton_step.py": {"triton"},
    "kernels/attention/triton_tables_kernel.py": {"triton"},
    "kernels/decode/triton_kernel.py": {"triton"},
    "kernels/patterns/triton_choice_kernel.py": {"triton"},
    "kernels/patterns/triton_kernels.py": {"triton"},
    "kernels/scored/triton_kernel.py": {"triton"},
    "runtime/caches/growing.py": {"transformers"},
    "runtime/caches/layer.py": {"transformers"},
    "runtime/vllm/specs.py": {"vllm"},
}


def imports(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether it happens on import), from function bodies and type-checking blocks too."""

    def walk(node: ast.AST, now: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield child.lineno, alias.name, now
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative imports hide where they point"
                assert child.module is not None
                # `from kernels import index` imports kernels.index, or a name of the package itself.
                names = [alias.name for alias in child.names]
                for name in names if "." not in child.module else [None]:
                    yield child.lineno, child.module if name is None else f"{child.module}.{name}", now
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, now and not lazy and not typing)

    yield from walk(tree, True)


def wrong(package: str, path: str, source: str) -> list[str]:
    """What in a module's imports goes against the rules."""
    found = []
    for line, module, now in imports(ast.parse(source)):
        top = module.partition(".")[0]
        if top in BELOW and top != package and top not in BELOW[package]:
            found.append(f"{path}:{line}: {package} may not import {module}")
        if top == "kernels" and not _is_room_of_kernels(module):
            found.append(f"{path}:{line}: {module} may be Hugging Face's: name a module of ours, like kernels.index")
        if top == "vllm" and not path.startswith(ENGINE_ROOM):
            found.append(f"{path}:{line}: only {' and '.join(ENGINE_ROOM)} may import {module}")
        if top in HEAVY - HEAVY_ROOMS.get(path, set()) and now and package in LIGHT_PACKAGES:
            found.append(f"{path}:{line}: import {top} where it is used, not at the top of {package}")
    return found


def _is_room_of_kernels(module: str) -> bool:
    parts = module.split(".")
    if len(parts) < 2:
        return False
    path = ROOT.joinpath(*parts[:2])
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("package", BELOW)
def test_imports_run_downwards(package: str) -> None:
    found = []
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    for path in paths:
        if path != ROOT / "kernels" / "__init__.py":
            found += wrong(package, path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def circle(package: str, sources: Mapping[str, str]) -> list[str]:
    """Rooms of a package that import one another, in a circle, also in functions and for types; none where none do.

    sources: what lies in the package, by path. What lies in no room is above them all.
    """
    rooms: dict[str, set[str]] = {}
    for path, source in sources.items():
        _, *room, _ = path.split("/")
        for _, module, _ in imports(ast.parse(source)):
            other = module.split(".")[1:2]
            if room and module.startswith(f"{package}.") and other != room[:1]:
                rooms.setdefault(room[0], set()).update(other)
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_rooms_of_search_import_one_way() -> None:
    paths = sorted((ROOT / "search").rglob("*.py"))
    assert not circle("search", {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def test_a_circle_is_seen_also_where_it_is_for_types() -> None:
    one, two = "from search.b.y import f", "if TYPE_CHECKING:\n    from search.a.z import g"
    assert set(circle("search", {"search/a/x.py": one, "search/b/y.py": two})) == {"a", "b"}
    assert not circle("search", {"search/a/x.py": one, "search/b/y.py": "from search.b.z import g", "search/c.py": two})


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("runtime", "import profiling.models.loading"),
        ("runtime", "def f():\n    from search.heads import run"),
        ("kernels", "from artifacts import load"),
        ("kernels", "if TYPE_CHECKING:\n    import artifacts.schema"),
        ("artifacts", "try:\n    import kernels.index\nexcept ImportError: pass"),
        ("profiling", "class A:\n    def f(self):\n        import search"),
        ("search", "import kernels"),
        ("search", "from kernels import get_kernel"),
        ("runtime", "from kernels import *"),
        ("runtime", "import transformers.utils"),
        ("kernels", "try:\n    import triton\nexcept ImportError: pass"),
        ("artifacts", "from matplotlib import pyplot"),
        ("profiling", "def f():\n    from vllm import LLM"),
    ],
)
def test_the_check_sees(package: str, source: str) -> None:
    assert len(wrong(package, "x.py", source)) == 1


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("runtime", "import kernels.index\nfrom kernels import dispatch\nfrom artifacts import load"),
        ("runtime", "def f():\n    import transformers"),
        ("kernels", "if TYPE_CHECKING:\n    import triton"),
        ("search", "import optuna\nfrom profiling.inside.capture import capture"),
    ],
)
def test_the_check_allows(package: str, source: str) -> None:
    assert not wrong(package, "x.py", source)


def test_a_serving_process_loads_no_more_than_it_needs() -> None:
    code = (
        "import sys, runtime, runtime.attention, runtime.fingerprint;"
        "print(sorted(sys.modules.keys() & {'optuna', 'matplotlib', 'triton', 'transformers', 'profiling', 'search'}))"
    )
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert out.strip() == "[]"


def test_the_plugin_loads_nothing_before_the_engine_asks() -> None:
    code = "import sys, runtime.vllm; print(sorted(sys.modules.keys() & {'torch', 'vllm', 'transformers'}))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"


def test_no_module_of_artifacts_imports_one_that_imports_it() -> None:
    """Not on import, in a function or for types alone."""
    paths = {_module(path): path for path in (ROOT / "artifacts").rglob("*.py")}
    below = {
        name: {found for _, found, _ in imports(ast.parse(path.read_text())) if found in paths} - {name, "artifacts"}
        for name, path in paths.items()
    }
    assert not circles(below)


def test_no_room_of_the_runtime_imports_one_that_imports_it() -> None:
    """Its folders, and the modules beside them: not on import, in a function or for types alone."""
    found = {}
    for path in (ROOT / "runtime").rglob("*.py"):
        if path != ROOT / "runtime" / "__init__.py":
            found[_module(path)] = [module for _, module, _ in imports(ast.parse(path.read_text()))]
    below = rooms_below(found)
    assert {"attention", "caches", "low_memory", "lossless", "omnikv", "vllm", "handle"} <= below.keys()
    assert not circles(below)


def rooms_below(modules: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """By room which others its modules import: runtime.caches.step is of the room caches, runtime.dense is one."""
    below: dict[str, set[str]] = {}
    for name, others in modules.items():
        room = name.split(".")[1]
        theirs = {other.split(".")[1] for other in others if other.startswith("runtime.")}
        below[room] = below.get(room, set()) | theirs - {room}
    return below


def circles(below: Mapping[str, set[str]]) -> set[str]:
    """Those of the names that are in a circle, or above one."""
    left = dict(below)
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    return set(left)


@pytest.mark.parametrize(
    ("caches", "found"),
    [
        ("from runtime.attention.calls import Call", {"attention", "caches", "handle"}),
        ("def f():\n    from runtime.attention.calls import Call", {"attention", "caches", "handle"}),
        ("if TYPE_CHECKING:\n    from runtime import handle", {"attention", "caches", "handle"}),
        ("from runtime.dense import right\nfrom runtime.caches.room import with_room", set()),
    ],
)
def test_circles_are_found(caches: str, found: set[str]) -> None:
    sources = {
        "runtime.dense": "import torch",
        "runtime.caches.step": caches,
        "runtime.attention.calls": "from runtime.caches.step import Step",
        "runtime.handle": "from runtime.attention import calls",
    }
    modules = {name: [module for _, module, _ in imports(ast.parse(source))] for name, source in sources.items()}
    assert circles(rooms_below(modules)) == found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_artifacts_needs_no_torch() -> None:
    code = "import sys, artifacts.__main__; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"
