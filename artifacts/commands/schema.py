"""Print the JSON Schema of the current version, with what every field means."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

from artifacts.cli.arguments import Json, Out, deliver
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.files import atomic_write, check_writable
from artifacts.schema.artifact import SCHEMA_VERSION, Artifact
from artifacts.store.write import SCHEMA_FILE

EXAMPLES = f"""\
The schema is of the fields alone. That rows and names go together, that hashes are right and that
the YAML is the subset that artifacts use, only `validate` knows. An artifact's first line names
the schema as {SCHEMA_FILE}: if that file is in the same folder, editors with the YAML language
server describe every field and complete names.

examples:
  headwise schema --out .                  writes ./{SCHEMA_FILE}
  headwise schema | jq '."$defs".VerticalSlash.properties'
"""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Config(CommandConfig):
    """Where to write the schema; --json puts it on one line."""

    as_json: Json = None
    out: Annotated[Out | None, Arg(f"write a file; in a folder it is {SCHEMA_FILE}")] = None


def run(config: Config) -> int:
    """Print the schema, or one line with the path of the written file.

    Raises:
        HeadwiseError: the file cannot be written.
    """
    text = json.dumps(schema(), indent=2)
    if config.out is None:
        deliver(text, json.dumps(schema()), config.as_json)
        return 0
    if os.path.isdir(config.out):
        out = config.out / SCHEMA_FILE
    else:
        out = config.out
    check_writable(out)
    atomic_write(out, f"{text}\n".encode())
    print(one_line(f"wrote {out}"))
    return 0


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the current version; every property has a description."""
    document = Artifact.model_json_schema(mode="validation")
    return {
        "$schema": _DIALECT,
        **document,
        "title": f"Headwise artifact, version {SCHEMA_VERSION}",
    }
