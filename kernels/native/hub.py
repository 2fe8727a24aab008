"""python -m kernels.native.hub FOLDER [--prebuild]: this package as one that Hugging Face's `kernels` loads.

    FOLDER/build/<variant>/      a copy of kernels/ with relative imports and operators of its own, and metadata.json

`torch-cpu` compiles its native code at first use, as the checkout does; with --prebuild a variant for this release of
torch and this architecture has it compiled. `torch-cuda` and `torch-rocm` are Triton's.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from kernels.native import build, prebuilt

_ROOT = Path(__file__).resolve().parents[1]
_NAME, _VERSION, _LICENSE = "headwise-sparse-attention", 1, "Apache-2.0"
# Of the package's own face and of what makes it.
_LEFT_OUT = frozenset(("__init__.py", "native/hub.py"))
_INIT = '''\
"""Sparse attention over a SparseIndex: patterns build one from queries and keys, CPU and Triton kernels compute it.

    plan = LayerPlan([make("vertical_slash", vertical=1000, slash=6096)] * num_heads, num_kv_heads)
    out = sparse_attention(q, k, v, plan.build(q, k))
"""

from .attention import sparse_attention
from .decode import decode_attention
from .index import SparseIndex
from .patterns import KINDS, LayerPlan, make
from .ragged import Ragged

__all__ = ["KINDS", "LayerPlan", "Ragged", "SparseIndex", "decode_attention", "make", "sparse_attention"]
'''
_CARD = """\
---
library_name: kernels
license: apache-2.0
---

# {name}

Attention over chosen tiles and columns of the keys (A-shape, vertical-slash, block-sparse and others by head), on CPUs
in native code and on GPUs in Triton. `kernels.get_local_kernel(Path(FOLDER))` gives the module; its docstring has an
example.
"""


def write(folder: Path, *, prebuild: bool = False) -> list[Path]:
    """Write the package into a folder; a build that is there is replaced.

    Args:
        folder: of the package; made where it is missing.
        prebuild: also compile the native code for every level of this architecture (kernels.native.prebuilt).

    Returns:
        The folders of its variants.

    Raises:
        ValueError: the folder holds something else, or nothing can be compiled here.
        OSError: it cannot be written.
    """
    made = folder / "build"
    if folder.exists() and any(path.name not in ("build", "README.md") for path in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no such package")
    shutil.rmtree(made, ignore_errors=True)
    variants = [("torch-cpu", "cpu"), ("torch-cuda", "cuda"), ("torch-rocm", "rocm")]
    if prebuild:
        variants.append((aot_variant(), "cpu"))
    written = []
    for variant, backend in variants:
        own = made / variant
        ident = _copy(own, backend if variant.startswith("torch-") else f"{backend}_aot")
        if variant == aot_variant():
            _compile(own, ident)
        (own / "metadata.json").write_text(json.dumps(_metadata(own, ident, backend), indent=2) + "\n")
        written.append(own)
    (folder / "README.md").write_text(_CARD.format(name=_NAME))
    return written


def aot_variant() -> str:
    """The name of a variant that is compiled for this torch and this machine."""
    major, minor = torch.__version__.split(".")[:2]
    return f"torch{major}{minor}-cxx11-cpu-{platform.machine()}-{platform.system().lower()}"


def _copy(own: Path, kind: str) -> str:
    """Copy the sources for a variant; returns the name that the module and its operators get, by their content."""
    files = [path.relative_to(_ROOT) for suffix in (".py", ".cpp", ".h") for path in sorted(_ROOT.rglob(f"*{suffix}"))]
    texts = {path: (_ROOT / path).read_text() for path in files if path.as_posix() not in _LEFT_OUT}
    content = hashlib.sha256(json.dumps({str(path): text for path, text in texts.items()}).encode()).hexdigest()
    ident = f"headwise_{kind}_{content[:12]}"
    texts = {path: _own_names(text, path, ident) for path, text in texts.items()}
    texts |= {Path("__init__.py"): _INIT, Path("_ops.py"): f"import torch\n\nops = torch.ops.{ident}\n"}
    for path, text in texts.items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text(text)
    return ident


def _own_names(text: str, path: Path, ident: str) -> str:
    """A source with relative imports and its own name for the operators."""
    if path.suffix != ".py":
        return re.sub(r"(TORCH_LIBRARY\w*\()headwise\b", rf"\g<1>{ident}", text)
    dots = "." * len(path.parts)
    text = re.sub(
        r"^(\s*)import kernels\.(\w+) as (\w+)$", rf"\g<1>from {dots} import \g<2> as \g<3>", text, flags=re.M
    )
    text = re.sub(r"^(\s*)from kernels\.([\w.]+) import ", rf"\g<1>from {dots}\g<2> import ", text, flags=re.M)
    if "torch.ops.headwise." in text:
        text = text.replace("torch.ops.headwise.", "ops.")
        text = re.sub(r"^from \.", f"from {dots}_ops import ops\nfrom .", text, count=1, flags=re.M)
    return text.replace("torch.ops.headwise", f"torch.ops.{ident}")


def _compile(own: Path, ident: str) -> None:
    compiler = build.find_compiler()
    if isinstance(compiler, str):
        raise ValueError(compiler)
    if not prebuilt.levels():
        raise ValueError(f"nothing is compiled in advance for {platform.machine()}")
    folder = own / "native" / "prebuilt"
    folder.mkdir()
    _import(own, ident)
    made = importlib.import_module(f"{ident}.native.build")
    for level, (flags, _) in prebuilt.levels().items():
        made.compile_library(compiler, prebuilt.library(level, folder), flags)


def _import(own: Path, ident: str) -> ModuleType:
    """The variant as a module, as Hugging Face's loader imports it."""
    spec = importlib.util.spec_from_file_location(ident, own / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[ident] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _metadata(own: Path, ident: str, backend: str) -> dict[str, object]:
    files = sorted(path for path in own.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    sums = {
        path.relative_to(own).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }
    return {
        "id": ident,
        "name": _NAME,
        "version": _VERSION,
        "license": _LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "kernels-minver": "0.17.0",
        "digest": {"algorithm": "sha256", "files": sums},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    p = argparse.ArgumentParser(prog="python -m kernels.native.hub", description=__doc__)
    p.add_argument("folder", type=Path, help="of the package")
    p.add_argument(
        "--prebuild", action="store_true", help="also a variant with compiled code for this torch and machine"
    )
    options = p.parse_args(argv)
    try:
        for variant in write(options.folder, prebuild=options.prebuild):
            print(f"wrote {variant}")
    except (OSError, ValueError) as error:
        p.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
