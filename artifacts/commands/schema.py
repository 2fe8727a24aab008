"""schema: the JSON Schema of the current version, or its fields as Markdown."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from artifacts.commands import Outcome
from artifacts.field_docs import DOCS, tables
from artifacts.schema import SCHEMA_VERSION, Artifact

SHORT = "print the JSON Schema of the current version, with what every field means"
EXAMPLES = """\
The schema is of the fields alone. That rows and names go together, that hashes are right and that the YAML
is the subset that artifacts use, only `validate` knows.

examples:
  python -m artifacts schema > artifact.schema.json
  python -m artifacts schema | jq '."$defs".VerticalSlash.properties'
  python -m artifacts schema --markdown               the tables of docs/artifact.md
"""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Whether as Markdown; the schema is JSON with and without as_json."""

    markdown: bool = False
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print tables of the fields for people")
    form.add_argument("--json", dest="as_json", action="store_true", help="print the schema on one line, for programs")


def run(config: Config) -> Outcome:
    """The schema."""
    if config.markdown:
        return Outcome(text=tables())
    return Outcome(text=json.dumps(schema(), indent=None if config.as_json else 2) + "\n")


def schema() -> dict[str, Any]:
    """The JSON Schema of the current version; every property has a description with its unit and first version."""
    made = Artifact.model_json_schema(mode="validation")
    for name, (_, fields) in DOCS.items():
        part = made if name == "Artifact" else made["$defs"][name]
        for field, doc in fields.items():
            said = f"{doc.type}: {doc.meaning} (since version {doc.since})"
            # Beside a $ref a description is allowed from this dialect on.
            part["properties"][field]["description"] = said.replace("`", "")
    title = f"Headwise artifact, version {SCHEMA_VERSION}"
    return {"$schema": _DIALECT, **made, "title": title}
