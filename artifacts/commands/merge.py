"""merge: sections of several artifacts of one model into one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.commands import Outcome, add_json, add_out
from artifacts.errors import ArtifactError, one_line
from artifacts.files import check_writable
from artifacts.merging import Part, merge
from artifacts.schema import Artifact
from artifacts.store import load_pair, save, update

if TYPE_CHECKING:
    from artifacts.sidecar import Array

SHORT = "put the prefill of one artifact, the decode of another and the kv_cache of a third into one"
EXAMPLES = """\
The first file gives everything that no option names; `none` leaves a section out. Unlike models are
refused by the first field that differs. Evidence is kept as it was measured, on the parts: measure the
whole again.

examples:
  python -m artifacts merge cfg.yaml --decode filters.yaml --out both.yaml
  python -m artifacts merge cfg.yaml --decode filters.yaml --kv-cache duo.yaml --out all.yaml
  python -m artifacts merge cfg.yaml --decode none --out prefill.yaml
"""
_NONE = "none"
_SECTIONS = ("decode", "kv_cache")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The file that gives what is not named, and of each section its file, `none`, or None for the first file."""

    file: Path
    out: Path
    prefill: Path | None = None
    decode: str | None = None
    kv_cache: str | None = None
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    parser.add_argument("file", metavar="FILE", type=Path, help="gives every section that no option names")
    parser.add_argument("--prefill", metavar="FILE", type=Path, help="search, patterns and prefill of this artifact")
    parser.add_argument("--decode", metavar="FILE", help="the decode section of this artifact, or none")
    parser.add_argument("--kv-cache", metavar="FILE", help="the kv_cache section of this artifact, or none")
    add_out(parser, "the artifact to write; may be one of those read")
    add_json(parser)


def run(config: Config) -> Outcome:
    """Merge and write.

    Raises:
        HeadwiseError: a file cannot be read, lacks the section, or is for another model; the sections do not go
            together; the output cannot be written.
    """
    check_writable(config.out)
    named = [config.file, config.prefill, *(_file(getattr(config, name), name) for name in _SECTIONS)]
    parts = {file.resolve(): _part(file) for file in named if file is not None}
    out = config.out.resolve()
    if out in parts:

        def change(artifact: Artifact, arrays: dict[str, Array]) -> tuple[Artifact, dict[str, Array]]:
            # Another command may have written to it since it was read.
            parts[out] = Part(file=config.out, artifact=artifact, arrays=arrays)
            return merge(*_chosen(config, parts))

        saved = update(config.out, change)
    else:
        artifact, arrays = merge(*_chosen(config, parts))
        saved = save(artifact, config.out, arrays)
    _, prefill, decode, kv_cache = _chosen(config, parts)
    origin = {
        "prefill": str(prefill.file),
        "decode": None if decode is None else str(decode.file),
        "kv_cache": None if kv_cache is None else str(kv_cache.file),
    }
    if config.as_json:
        whole = {"wrote": str(config.out), "sections": origin, "content_sha256": saved.content_sha256}
        return Outcome(text=json.dumps(whole) + "\n")
    lines = [f"wrote {config.out}", *(f"  {section:<9} {file or 'none'}" for section, file in origin.items())]
    if saved.evidence:
        lines.append(f"  evidence  {len(saved.evidence.measurements)} measured on the parts: measure the whole again")
    return Outcome(text="".join(f"{one_line(line)}\n" for line in lines))


def _file(given: str | None, name: str) -> Path | None:
    if given == "":
        raise ArtifactError(f"--{name.replace('_', '-')}: give an artifact's YAML file, or {_NONE}")
    return None if given in (None, _NONE) else Path(str(given))


def _part(file: Path) -> Part:
    artifact, arrays = load_pair(file)
    return Part(file=file, artifact=artifact, arrays=arrays)


def _chosen(config: Config, parts: Mapping[Path, Part]) -> tuple[Part, Part, Part | None, Part | None]:
    """The part that gives what is not named, and those of prefill, decode and kv_cache."""
    base = parts[config.file.resolve()]
    prefill = base if config.prefill is None else parts[config.prefill.resolve()]

    def section(name: str) -> Part | None:
        given = getattr(config, name)
        if given is None:
            return base if getattr(base.artifact, name) is not None else None
        return None if given == _NONE else parts[Path(given).resolve()]

    return base, prefill, section("decode"), section("kv_cache")
