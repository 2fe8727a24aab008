"""migrate: an artifact of an older schema version, written again in the current one."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from artifacts import strict_yaml
from artifacts.commands import FOUND, Outcome, add_file, add_json
from artifacts.errors import ArtifactError, one_line
from artifacts.files import check_writable
from artifacts.migrations import version_of
from artifacts.schema import SCHEMA_VERSION
from artifacts.store import load_pair, read_yaml, save, update

SHORT = "write an artifact of an older schema version again in the current one"
EXAMPLES = """\
Older files are read as they are; migrate them before an older reader is gone, or to diff two of unlike
versions line by line. Without --out nothing is written: the exit status is 1 if the file is of an older
version. The file's time stays, and with it all that was found; its hash is that of the new fields.

examples:
  python -m artifacts migrate cfg.yaml                     which version is it?
  python -m artifacts migrate cfg.yaml --out cfg.yaml      in place; the old pair or the new one is there
  python -m artifacts migrate old.yaml --out new.yaml
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which file, and where to; None only looks."""

    file: Path
    out: Path | None = None
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    add_file(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the artifact here; may be FILE itself")
    add_json(parser)


def run(config: Config) -> Outcome:
    """Look, and write if asked.

    Raises:
        HeadwiseError: the pair is not whole, or cannot be written.
    """
    if config.out is not None:
        check_writable(config.out)
    artifact, arrays = load_pair(config.file)
    version = _version(config.file)
    old = version < SCHEMA_VERSION
    if config.out is not None and config.out.resolve() == config.file.resolve():
        update(config.out, lambda now, beside: (now, beside))
    elif config.out is not None:
        save(artifact, config.out, arrays)
    status = FOUND if old and config.out is None else 0
    if config.as_json:
        wrote = None if config.out is None else str(config.out)
        facts = {"file": str(config.file), "version": version, "current": SCHEMA_VERSION, "wrote": wrote}
        return Outcome(text=json.dumps(facts) + "\n", status=status)
    of = f"version {version}, the current one" if not old else f"version {version}, the current one is {SCHEMA_VERSION}"
    did = f"; wrote {config.out} in version {SCHEMA_VERSION}" if config.out else "; --out FILE writes it" if old else ""
    return Outcome(text=f"{one_line(f'{config.file}: {of}{did}')}\n", status=status)


def _version(file: Path) -> int:
    fields = strict_yaml.parse(read_yaml(file))
    if not isinstance(fields, dict):
        raise ArtifactError(f"{one_line(str(file))}: was replaced meanwhile, try again")
    return version_of(fields)
