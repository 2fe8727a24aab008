"""Supported formats of other tools, by name: the FORMAT of each module beside this one."""

from __future__ import annotations

from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from artifacts.errors import ArtifactError, one_line
from artifacts.interop.format import Format


def _found() -> dict[str, Format]:
    names = (module.name for module in iter_modules([str(Path(__file__).parent)]))
    modules = (import_module(f"{__package__}.{name}") for name in names if name != "formats")
    formats = [form for module in modules if isinstance(form := vars(module).get("FORMAT"), Format)]
    return {form.name: form for form in formats}


FORMATS = _found()


def guess(file: Path) -> str:
    """Return the format of a file from its name.

    Raises:
        ArtifactError: the name is that of an artifact.
    """
    if file.suffix in (".yaml", ".yml"):
        raise ArtifactError(
            f"{one_line(str(file))}: is an artifact by its name: say with --to what to write from "
            f"it"
        )
    named = (
        name
        for name, form in FORMATS.items()
        if any(fnmatch(file.name, pattern) for pattern in form.files)
    )
    return next(named, "minference")
