"""merge: sections of several artifacts of one model into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.analysis.merging import Part, merge
from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag, out_arg
from artifacts.errors import ArtifactError
from artifacts.files import check_writable
from artifacts.schema.artifact import Artifact
from artifacts.store.read import load_pair
from artifacts.store.write import save, update

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

SHORT = (
    "put the prefill of one artifact, the decode of another and the kv_cache of a third into one"
)
EXAMPLES = """\
The first file gives everything that no option names; `none` leaves a section out. Unlike models are
refused by the first field that differs. Evidence is kept as it was measured, on the parts:
measure the whole again.

examples:
  headwise merge cfg.yaml --decode filters.yaml --out both.yaml
  headwise merge cfg.yaml --decode filters.yaml --kv-cache duo.yaml --out all.yaml
  headwise merge cfg.yaml --decode none --out prefill.yaml
"""
_NONE = "none"
_SECTIONS = ("decode", "kv_cache")


@dataclass(frozen=True, kw_only=True)
class Config:
    """File that gives the rest, and each section's own file, `none`, or None for the first file."""

    file: Path = file_arg(help="gives every section that no option names")
    prefill: Path | None = arg(
        "--prefill",
        metavar="FILE",
        type=Path,
        default=None,
        help="search, patterns and prefill of this artifact",
    )
    decode: str | None = arg(
        "--decode",
        metavar="FILE",
        default=None,
        help="the decode section of this artifact, or none",
    )
    kv_cache: str | None = arg(
        "--kv-cache",
        metavar="FILE",
        default=None,
        help="the kv_cache section of this artifact, or none",
    )
    out: Path = out_arg("the artifact to write; may be one of those read")
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Merge and write.

    Raises:
        HeadwiseError: a file cannot be read, lacks the section, or is for another model; the
            sections do not go together; the output cannot be written.
    """
    check_writable(config.out)
    named = [
        config.file,
        config.prefill,
        *(_file(getattr(config, name), name) for name in _SECTIONS),
    ]
    parts = {file.resolve(): _part(file) for file in named if file is not None}
    out = config.out.resolve()
    if out in parts:

        def change(
            artifact: Artifact, arrays: dict[str, Array]
        ) -> tuple[Artifact, dict[str, Array]]:
            # Another command may have written to it since it was read.
            parts[out] = Part(file=config.out, artifact=artifact, arrays=arrays)
            return merge(*_chosen(config, parts))

        saved = update(config.out, change)
    else:
        artifact, arrays = merge(*_chosen(config, parts))
        saved = save(artifact, config.out, arrays)
    chosen = zip(("prefill", *_SECTIONS), _chosen(config, parts)[1:], strict=True)
    origin = {section: None if part is None else str(part.file) for section, part in chosen}
    whole = {"wrote": str(config.out), "sections": origin, "content_sha256": saved.content_sha256}
    lines = [
        f"wrote {config.out}",
        *(f"  {section:<9} {file or 'none'}" for section, file in origin.items()),
    ]
    if count := len(saved.evidence.measurements):
        lines.append(f"  evidence  {count} measured on the parts: measure the whole again")
    return answer(config.as_json, whole, lines)


def _file(given: str | None, name: str) -> Path | None:
    if given == "":
        raise ArtifactError(f"--{name.replace('_', '-')}: give an artifact's YAML file, or {_NONE}")
    if given in (None, _NONE):
        return None
    return Path(str(given))


def _part(file: Path) -> Part:
    artifact, arrays = load_pair(file)
    return Part(file=file, artifact=artifact, arrays=arrays)


def _chosen(
    config: Config, parts: Mapping[Path, Part]
) -> tuple[Part, Part, Part | None, Part | None]:
    """The part that gives what is not named, and those of prefill, decode and kv_cache."""
    base = parts[config.file.resolve()]
    if config.prefill is None:
        prefill = base
    else:
        prefill = parts[config.prefill.resolve()]

    def section(name: str) -> Part | None:
        given = getattr(config, name)
        if given is None:
            if getattr(base.artifact, name) is not None:
                return base
            return None
        if given == _NONE:
            return None
        return parts[Path(given).resolve()]

    return base, prefill, section("decode"), section("kv_cache")
