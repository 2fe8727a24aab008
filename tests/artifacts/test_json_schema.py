"""Every field is described, in the page as in the JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from artifacts.__main__ import main
from artifacts.commands.schema import schema, tables
from artifacts.schema.artifact import SCHEMA_VERSION, Artifact
from artifacts.store.write import SCHEMA_FILE

PAGE = Path(__file__).parents[2] / "docs" / "schema.md"


def models(annotation: Any) -> set[type[BaseModel]]:
    """The models that an annotation names, and those that their fields name."""
    found = set()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found = {annotation}.union(
            *(models(field.annotation) for field in annotation.model_fields.values())
        )
    return found.union(*map(models, get_args(annotation)))


def test_every_field_is_described_and_has_its_line():
    lines = tables().splitlines()
    for model in models(Artifact):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}: describe it where it is declared"
            described = [line for line in lines if line.startswith(f"| `{name}` |")]
            assert any(field.description in line for line in described)


def test_the_page_has_these_tables():
    assert tables() in PAGE.read_text(), (
        "docs/schema.md: put in what `headwise schema --markdown` prints"
    )


def test_the_schema_is_printed(capsys):
    assert main(["schema", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == schema() and f"version {SCHEMA_VERSION}" in made["title"]
    assert made["$schema"].startswith("https://json-schema.org/")
    for part in (made, *made["$defs"].values()):
        for name, field in part.get("properties", {}).items():
            assert field["description"], name


def test_a_file_names_the_schema_that_lies_beside_it(saved, capsys):
    first = saved.read_text().splitlines()[0]
    assert first == f"# yaml-language-server: $schema={SCHEMA_FILE}"
    assert main(["schema", "--out", str(saved.parent)]) == 0
    assert capsys.readouterr().out == f"wrote {saved.with_name(SCHEMA_FILE)}\n"
    assert json.loads(saved.with_name(SCHEMA_FILE).read_text()) == schema()
