"""schema: the JSON Schema of the current version."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.commands import Outcome, as_asked, json_flag, out_arg
from artifacts.errors import one_line
from artifacts.files import atomic_write, check_writable
from artifacts.schema.artifact import SCHEMA_VERSION, Artifact
from artifacts.store.write import SCHEMA_FILE

SHORT = "print the JSON Schema of the current version, with what every field means"
EXAMPLES = f"""\
The schema is of the fields alone. That rows and names go together, that hashes are right and that
the YAML is the subset that artifacts use, only `validate` knows. An artifact's first line names
the schema as {SCHEMA_FILE}: where that file lies beside it, editors with the YAML language server
show what every field means and complete names.

examples:
  headwise schema --out .                  writes ./{SCHEMA_FILE}
  headwise schema | jq '."$defs".VerticalSlash.properties'
"""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Where to write the schema; --json puts it on one line."""

    as_json: Path | None = json_flag()
    out: Path | None = out_arg(f"write a file; in a folder it is {SCHEMA_FILE}", default=None)


def run(config: Config) -> Outcome:
    """Return the schema, or one line with the path of the written file.

    Raises:
        HeadwiseError: the file cannot be written.
    """
    text = json.dumps(schema(), indent=2) + "\n"
    if config.out is None:
        return as_asked(config.as_json, json.dumps(schema()), text)
    if config.out.is_dir():
        out = config.out / SCHEMA_FILE
    else:
        out = config.out
    check_writable(out)
    atomic_write(out, text.encode())
    return Outcome(text=one_line(f"wrote {out}") + "\n")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the current version; every property has a description."""
    document = Artifact.model_json_schema(mode="validation")
    return {
        "$schema": _DIALECT,
        **document,
        "title": f"Headwise artifact, version {SCHEMA_VERSION}",
    }
