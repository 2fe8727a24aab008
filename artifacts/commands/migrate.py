"""migrate: an artifact of an older schema version, written again in the current one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts import strict_yaml
from artifacts.command_line import FOUND
from artifacts.commands import Outcome, answer, file_arg, json_flag, out_arg
from artifacts.files import check_writable
from artifacts.migrations import version_of
from artifacts.schema import SCHEMA_VERSION
from artifacts.store import read_pair, update

SHORT = "write an artifact of an older schema version again in the current one"
EXAMPLES = """\
Older files are read as they are; migrate them before an older reader is gone, or to diff two of unlike
versions line by line. Without --out nothing is written: the exit status is 3 if the file is of an older
version. The file's time stays, and with it all that was found; its hash is that of the new fields.

examples:
  python -m artifacts migrate cfg.yaml                     which version is it?
  python -m artifacts migrate cfg.yaml --out cfg.yaml      in place; the old pair or the new one is there
  python -m artifacts migrate old.yaml --out new.yaml
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which file, and where to; None only looks."""

    file: Path = file_arg()
    out: Path | None = out_arg("write the artifact here; may be FILE itself", default=None)
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Look, and write if asked.

    Raises:
        HeadwiseError: the pair is not whole, or cannot be written.
    """
    if config.out is not None:
        check_writable(config.out)
    version = version_of(strict_yaml.parse(read_pair(config.file).data))
    old = version < SCHEMA_VERSION
    if config.out is not None:
        update(config.file, lambda now, beside: (now, beside), out=config.out)
    wrote = None if config.out is None else str(config.out)
    facts = {"file": str(config.file), "version": version, "current": SCHEMA_VERSION, "wrote": wrote}
    of = f"version {version}, the current one{f' is {SCHEMA_VERSION}' if old else ''}"
    did = f"; wrote {config.out} in version {SCHEMA_VERSION}" if config.out else "; --out FILE writes it" if old else ""
    return answer(config.as_json, facts, [f"{config.file}: {of}{did}"], status=FOUND if old and not wrote else 0)
