"""What is said of the fields is said of all of them, and the page and the JSON Schema say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from artifacts import strict_yaml
from artifacts.__main__ import main
from artifacts.commands.migrate import Config, run
from artifacts.commands.schema import schema
from artifacts.field_docs import DOCS, tables
from artifacts.schema import SCHEMA_VERSION, Artifact
from artifacts.store import load

PAGE = Path(__file__).parents[2] / "docs" / "artifact.md"
GOLDEN = Path(__file__).parent / "golden"


def models(annotation: Any) -> set[type[BaseModel]]:
    """The models that an annotation names, and those that their fields name."""
    found = set()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        found = {annotation}.union(*(models(field.annotation) for field in annotation.model_fields.values()))
    return found.union(*map(models, get_args(annotation)))


def test_every_field_is_described():
    in_code = {model.__name__: list(model.model_fields) for model in models(Artifact)}
    described = {name: list(fields) for name, (_, fields) in DOCS.items()}
    assert described == in_code, "describe the field in artifacts/field_docs.py and print the tables into the page"


def test_the_page_has_these_tables():
    assert tables() in PAGE.read_text(), "docs/artifact.md: put in what `python -m artifacts schema --markdown` prints"


def test_every_property_of_the_schema_has_its_description(capsys):
    assert main(["schema", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == schema()
    for part in (made, *made["$defs"].values()):
        for name, field in part.get("properties", {}).items():
            assert "since version" in field["description"], name
    assert made["$schema"].startswith("https://json-schema.org/") and f"version {SCHEMA_VERSION}" in made["title"]


def test_since_which_version():
    """The files that stay for ever show which version had which field first."""
    files = [strict_yaml.parse((GOLDEN / f"v{n}.yaml").read_bytes()) for n in range(1, SCHEMA_VERSION + 1)]
    for name, part in (("Artifact", None), ("ModelInfo", "model"), ("Prefill", "prefill"), ("SearchInfo", "search")):
        parts = files if part is None else [fields[part] for fields in files]
        since = {field: doc.since for field, doc in DOCS[name][1].items()}
        assert since == {field: 1 + next(n for n, had in enumerate(parts) if field in had) for field in parts[-1]}


def test_markdown(capsys):
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == tables()


def test_migrate(tmp_path):
    looked = run(Config(file=GOLDEN / "v1.yaml"))
    assert looked.status == 1 and f"version 1, the current one is {SCHEMA_VERSION}; --out FILE writes it" in looked.text
    outcome = run(Config(file=GOLDEN / "v1.yaml", out=tmp_path / "new.yaml", as_json=True))
    assert outcome.status == 0 and json.loads(outcome.text)["version"] == 1
    assert load(tmp_path / "new.yaml").model_dump(exclude={"sidecar"}) == load(GOLDEN / "v1.yaml").model_dump(
        exclude={"sidecar"}
    )
    assert strict_yaml.parse((tmp_path / "new.yaml").read_bytes())["schema_version"] == SCHEMA_VERSION
    again = run(Config(file=tmp_path / "new.yaml", out=tmp_path / "new.yaml"))
    assert again.status == 0 and f"version {SCHEMA_VERSION}, the current one; wrote" in again.text


@pytest.mark.parametrize("verb", ["lint", "diff", "merge", "convert", "migrate", "schema"])
def test_help_teaches_by_examples(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and f"examples:\n  python -m artifacts {verb} " in text and "--json" in text
