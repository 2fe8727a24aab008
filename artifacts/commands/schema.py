"""schema: the JSON Schema of the current version, or its fields as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from artifacts.cli.options import arg
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
  headwise schema --markdown               the tables of docs/schema.md
"""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {"integer": "int", "string": "text", "boolean": "true or false", "object": "mapping"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Markdown or JSON Schema, and where to; --json puts JSON on one line."""

    markdown: bool = arg(
        "--markdown", action="store_true", default=False, help="print tables of the fields"
    )
    as_json: Path | None = json_flag()
    out: Path | None = out_arg(f"write a file; in a folder it is {SCHEMA_FILE}", default=None)


def run(config: Config) -> Outcome:
    """The schema, or one line on where it was written.

    Raises:
        HeadwiseError: the file cannot be written.
    """
    if config.markdown:
        text = tables()
    else:
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
    """The JSON Schema of the current version; every property has a description."""
    made = Artifact.model_json_schema(mode="validation")
    return {"$schema": _DIALECT, **made, "title": f"Headwise artifact, version {SCHEMA_VERSION}"}


def tables() -> str:
    """The fields as Markdown: a heading and a table for each part of the file."""
    made = schema()
    places: dict[type[BaseModel], list[str]] = {}
    for model, place in _parts(Artifact, ""):
        places.setdefault(model, []).append(place)
    parts = []
    for model, where in places.items():
        if model is Artifact:
            part = made
        else:
            part = made["$defs"][model.__name__]
        lines = [f"### {', '.join(where)}", "", "| field | type | meaning |", "|---|---|---|"]
        for name, field in part["properties"].items():
            lines.append(f"| `{name}` | {_type(field, made['$defs'])} | {field['description']} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _parts(model: type[BaseModel], path: str) -> Iterator[tuple[type[BaseModel], str]]:
    """The models that a file is made of, each with where it lies."""
    yield model, path or "the file"
    for name, field in model.model_fields.items():
        if path:
            below = f"{path}.{name}"
        else:
            below = name
        for inner in list(_models(field.annotation)):
            if "kind" in inner.model_fields:
                yield from _parts(inner, f"{below}, kind {inner.model_fields['kind'].default}")
            elif field.annotation is inner or _optional(field.annotation):
                yield from _parts(inner, below)
            else:
                yield from _parts(inner, f"{below}, each entry")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _optional(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def _type(field: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Type of a field in words, from its JSON Schema."""
    if "$ref" in field or "discriminator" in field:
        return "mapping"
    for values in (field.get("enum"), [field["const"]] if "const" in field else None):
        if values:
            return ", ".join(f"`{value}`" for value in values)
    if several := field.get("anyOf", field.get("oneOf")):
        return " or ".join(dict.fromkeys(_type(each, models) for each in several))
    if field.get("type") == "array":
        if "items" in field:
            return f"list of {_type(field['items'], models)}"
        return "list"
    extra = field.get("additionalProperties")
    if isinstance(extra, dict):
        if extra.get("$ref", "").endswith("JsonValue"):
            return "mapping"
        return f"name: {_type(extra, models)}"
    return _TYPES.get(str(field.get("type")), str(field.get("type")))
