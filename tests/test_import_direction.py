"""Imports run one way: headwise > search > profiling > runtime > kernels | artifacts.

On import headwise takes runtime and artifacts alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW: dict[str, set[str]] = {
    "kernels": set(),
    "artifacts": set(),
    "runtime": {"kernels", "artifacts"},
    "headwise": {"search", "profiling", "runtime", "artifacts"},
    "profiling": {"runtime", "kernels", "artifacts"},
    "search": {"profiling", "runtime", "kernels", "artifacts"},
}
# Needed by some calls only: a serving process imports runtime without them.
HEAVY = {"optuna", "matplotlib", "transformers", "triton", "vllm"}
# What knows of vLLM: the plugin.
ENGINE_ROOM = "runtime/vllm/"
# Packages that headwise imports where a call needs them.
ON_CALL = {"search", "profiling"}
LIGHT_PACKAGES = {"headwise", "runtime", "kernels", "artifacts"}
# A room of its own for each heavy library: the module is imported lazily, and holds nothing but its
# code.
HEAVY_ROOMS = {
    "kernels/attention/triton_kernel.py": {"triton"},
    "kernels/attention/triton_loops.py": {"triton"},
    "kernels/attention/triton_small_kernels.py": {"triton"},
    "kernels/attention/triton_step.py": {"triton"},
    "kernels/decode/triton_kernel.py": {"triton"},
    "kernels/patterns/triton_choice_kernel.py": {"triton"},
    "kernels/patterns/triton_kernels.py": {"triton"},
    "kernels/patterns/triton_means_kernels.py": {"triton"},
    "runtime/caches/growing.py": {"transformers"},
    "runtime/caches/layer.py": {"transformers"},
    "runtime/vllm/specs.py": {"vllm"},
}


def imports(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether it happens on import), from function bodies and type-checking blocks
    too."""

    def walk(node: ast.AST, now: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in child.names]
                if isinstance(child, ast.ImportFrom):
                    relative = f"line {child.lineno}: relative imports hide where they point"
                    assert child.level == 0 and child.module, relative
                    # `from kernels import index` imports kernels.index, or a name of the package.
                    modules = [f"{child.module}.{name}" for name in modules]
                    if "." in child.module:
                        modules = [child.module]
                yield from ((child.lineno, module, now) for module in modules)
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
        faults = []
        if top in BELOW and top != package and top not in BELOW[package]:
            faults.append(f"{package} may not import {module}")
        if top == "benchmarks":
            faults.append(f"{module} is no part of a package")
        if top == "kernels" and not _is_room_of_kernels(module):
            faults.append(f"{module} may be Hugging Face's: name a module of ours: kernels.index")
        if package == "headwise" and top in ON_CALL and now:
            faults.append(f"import {module} in the function that needs it")
        if top == "vllm" and not path.startswith(ENGINE_ROOM):
            faults.append(f"only {ENGINE_ROOM} may import {module}")
        if top in HEAVY - HEAVY_ROOMS.get(path, set()) and now and package in LIGHT_PACKAGES:
            faults.append(f"import {top} where it is used, not at the top of {package}")
        found += [f"{path}:{line}: {fault}" for fault in faults]
    return found


def _is_room_of_kernels(module: str) -> bool:
    parts = module.split(".")
    if len(parts) < 2:
        return False
    path = ROOT.joinpath(*parts[:2])
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("package", BELOW)
def test_imports_run_downwards(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    found = []
    for path in paths:
        if path != ROOT / "kernels" / "__init__.py":
            name = path.relative_to(ROOT).as_posix()
            found += wrong(package, name, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "source", "faults"),
    [
        ("runtime", "import profiling.models.loading", 1),
        ("runtime", "def f():\n    from search.heads import run", 1),
        ("headwise", "from search.heads import run", 1),
        ("headwise", "def f():\n    from search.gate import run", 0),
        ("headwise", "def f():\n    import kernels.index", 1),
        ("kernels", "if TYPE_CHECKING:\n    import artifacts.schema.artifact", 1),
        ("artifacts", "try:\n    import kernels.index\nexcept ImportError: pass", 1),
        ("search", "import kernels", 1),
        ("search", "import optuna\nfrom profiling.inside.capture import capture", 0),
        ("profiling", "from benchmarks import kvpress", 1),
        ("runtime", "from kernels import *", 1),
        ("runtime", "import kernels.index\nfrom kernels import registry", 0),
        ("runtime", "import transformers.utils", 1),
        ("runtime", "from artifacts import load\ndef f():\n    import transformers", 0),
        ("kernels", "try:\n    import triton\nexcept ImportError: pass", 1),
        ("kernels", "if TYPE_CHECKING:\n    import triton", 0),
        ("profiling", "def f():\n    from vllm import LLM", 1),
    ],
)
def test_the_check_sees_what_is_wrong_alone(package, source, faults):
    assert len(wrong(package, "x.py", source)) == faults


# Imports in one process after one another, and what none of them has loaded until then.
KEPT_OUT = {
    "artifacts.__main__": {"torch", "numpy", "safetensors", "transformers", "kernels", "runtime"},
    # The plugin loads nothing before the engine asks.
    "runtime.vllm": {"torch", "vllm", "transformers"},
    "headwise": {"torch", "transformers"},
    "headwise, runtime.attention, runtime.fingerprint": HEAVY | {"profiling", "search"},
}


def test_an_import_loads_no_more_than_it_needs():
    lines = [
        f"import {modules}\nassert not sys.modules.keys() & {kept_out}, {modules!r}"
        for modules, kept_out in KEPT_OUT.items()
    ]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], cwd=ROOT, check=True)


def test_the_python_package_has_the_names_of_the_others():
    import artifacts
    import headwise
    import runtime

    assert headwise.load is runtime.load and headwise.apply_dense is runtime.apply_dense
    assert headwise.HeadwiseError is artifacts.HeadwiseError and "apply_dense" in dir(headwise)
    assert headwise.__version__ == version("headwise")


def circle(sources: Mapping[str, str], depth: int) -> list[str]:
    """Names in a circle of imports, also in functions and for types; none where there is none.

    sources: what modules of one package say, by their names, of which the first `depth` parts
    count. The package's own `__init__` is above them all."""

    def cut(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    known = set(map(cut, sources))
    below: dict[str, set[str]] = {name: set() for name in known}
    for name, source in sources.items():
        theirs = {cut(module) for _, module, _ in imports(ast.parse(source))}
        below[cut(name)] |= (theirs & known) - {cut(name), name.partition(".")[0]}
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize(
    ("package", "depth"),
    [("artifacts", 3), *((name, 2) for name in BELOW if name != "headwise")],
)
def test_nothing_imports_what_imports_it(package, depth):
    """Folders and the modules beside them; in artifacts also the modules of folders."""
    paths = (ROOT / package).rglob("*.py")
    modules = {_module(path): path.read_text(encoding="utf-8") for path in paths}
    del modules[package]
    assert len(modules) > 30 and not circle(modules, depth)


CIRCLE = {"runtime.attention", "runtime.caches"}


@pytest.mark.parametrize(
    ("caches", "found"),
    [
        ("from runtime.attention.state import Call", CIRCLE),
        ("def f():\n    from runtime.attention.state import Call", CIRCLE),
        ("if TYPE_CHECKING:\n    from runtime import apply", CIRCLE | {"runtime.apply"}),
        ("from runtime.standin import NewTokens\nfrom runtime.caches.window import Window", set()),
    ],
)
def test_circles_are_found(caches, found):
    sources = {
        "runtime.standin": "import torch",
        "runtime.caches.policy": caches,
        "runtime.attention.state": "from runtime.caches.policy import Step",
        "runtime.apply": "from runtime.attention import state",
    }
    assert set(circle(sources, 2)) == found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
