"""Departures from setuptools' defaults: Hugging Face has a package named `kernels` too, and wheels
bring native code.

HEADWISE_PREBUILD=1 compiles the CPU kernels for every instruction set that
kernels/native/prebuilt.py names, and the wheel is then one for this platform and any Python. It
needs torch: build without isolation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
PREBUILD = os.environ.get("HEADWISE_PREBUILD") == "1"


class BuildPy(build_py):
    """Leaves kernels/__init__.py out: in site-packages both share one folder, and theirs keeps its
    own."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("kernels", "__init__")]

    def run(self) -> None:
        super().run()
        if not PREBUILD or self.editable_mode:
            return
        sys.path.insert(0, str(ROOT))
        from kernels.native import build, prebuilt

        compiler = build.find_compiler()
        if isinstance(compiler, str):
            raise SystemExit(compiler)
        folder = Path(self.build_lib) / "kernels" / "native" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        for level, (flags, _) in prebuilt.levels().items():
            build.compile_library(compiler, prebuilt.library(level, folder), flags)


class BdistWheel(bdist_wheel):
    """The libraries are operators of torch and no modules of Python's: one wheel for every version
    of it."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PREBUILD else (python, abi, platform)


class WithNativeCode(Distribution):
    """Marks the wheel as one of this platform."""

    def has_ext_modules(self) -> bool:
        return PREBUILD


class EditableWheel(editable_wheel):
    """Puts the checkout at the front of the path: behind site-packages their `kernels` would hide
    ours."""

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        strategy = super()._select_strategy(name, tag, build_lib)
        return _AtFront(strategy, f"__editable__.{name}.pth")


class _AtFront:
    def __init__(self, strategy: Any, pth: str) -> None:
        self.strategy = strategy
        self.pth = pth

    def __call__(self, wheel: Any, files: Any, mapping: Any) -> None:
        wheel.writestr(self.pth, f"import sys; sys.path.insert(0, {str(ROOT)!r})\n")

    def __enter__(self) -> _AtFront:
        return self

    def __exit__(self, *_: object) -> None:
        return None


setup(
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel, "editable_wheel": EditableWheel},
    distclass=WithNativeCode,
)
