"""merge: sections of several artifacts of one model into one."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, add_json, add_out
from artifacts.errors import ArtifactError, one_line
from artifacts.files import check_writable
from artifacts.merging import Part, merge
from artifacts.store import load_pair, save

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
    base = _part(config.file)
    prefill = base if config.prefill is None else _part(config.prefill)
    decode = _section(config.decode, base, "decode")
    kv_cache = _section(config.kv_cache, base, "kv_cache")
    artifact, arrays = merge(base, prefill, decode, kv_cache)
    saved = save(artifact, config.out, arrays)
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
        lines.append(f"  evidence  {len(saved.evidence)} measured on the parts: measure the whole again")
    return Outcome(text="".join(f"{one_line(line)}\n" for line in lines))


def _part(file: Path) -> Part:
    artifact, arrays = load_pair(file)
    return Part(file=file, artifact=artifact, arrays=arrays)


def _section(given: str | None, base: Part, name: str) -> Part | None:
    if given is None:
        return base if getattr(base.artifact, name) is not None else None
    if not given:
        raise ArtifactError(f"--{name.replace('_', '-')}: give an artifact's YAML file, or {_NONE}")
    return None if given == _NONE else _part(Path(given))
