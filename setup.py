"""Two departures from setuptools' defaults, both because Hugging Face has a package named `kernels` too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent


class BuildPy(build_py):
    """Leaves kernels/__init__.py out: in site-packages both share one folder, and theirs keeps its own."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("kernels", "__init__")]


class EditableWheel(editable_wheel):
    """Puts the checkout at the front of the path: behind site-packages their `kernels` would hide ours."""

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


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
