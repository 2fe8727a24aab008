"""Result files have one schema, and the tables of the pages are made from them."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from artifacts import HeadwiseError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = sorted((DOCS / "results").glob("*.json"))


@pytest.fixture(scope="module")
def tables():
    """The module of benchmarks/tables.py."""
    yield from imported("tables")


@pytest.fixture(scope="module")
def result():
    """The module of benchmarks/result.py."""
    yield from imported("result")


def imported(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module(name)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_result_file_has_the_schema_and_the_form_of_the_writer(result: ModuleType, path: Path):
    assert result.text(result.read(path)) == path.read_text(encoding="utf-8")


def valid(**changes: Any) -> dict[str, Any]:
    content = {"what": "w", "command": "c", "commit": "1", "machine": "m", "versions": {"t": "2"}}
    return {**content, "rows": [{"name": "a", "values": [1, None], "by": {"b": [1.5]}}]} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"what": ""},
        {"extra": 1},
        {"versions": {"t": 2}},
        {"rows": []},
        {"rows": [{"a": {"b": {"c": 1}}}]},
        {"rows": [{"a": [{"b": 1}]}]},
        {"rows": [{"a": math.nan}]},
    ],
    ids=str,
)
def test_result_rejects_another_schema(result: ModuleType, changes: dict[str, Any]):
    assert result.Result(**valid()).rows[0]["by"] == {"b": [1.5]}
    with pytest.raises(ValidationError):
        result.Result(**valid(**changes))


def test_flat_joins_names_below_the_first_level(result: ModuleType):
    row = {"a": {"b": {"c": {"d": 1}, "e": 2}}, "f": {"g": 3}}
    assert result.flat(row) == {"a.b.c": {"d": 1}, "a.b.e": 2, "f": {"g": 3}}


def test_read_names_the_fault_of_a_file(result: ModuleType, tmp_path: Path):
    path = tmp_path / "a.json"
    with pytest.raises(HeadwiseError, match=r"cannot read .*a\.json"):
        result.read(path)
    path.write_text(json.dumps(valid(rows=[])))
    with pytest.raises(HeadwiseError, match="is no result file: rows: "):
        result.read(path)


def test_pages_have_the_tables_of_the_result_files(tables: ModuleType):
    results = tables.Results()
    named = []
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        assert tables.with_tables(text, results, tables.folder_of(page)) == text, page.name
        named += [match[1] for match in tables.MARKED.finditer(text)]
        assert text.count("<!-- table: ") == text.count("<!-- end of table -->")
    assert set(named) == set(tables.TABLES)


class Changed:
    """The result files with all figures changed, and which of them were read."""

    def __init__(self, results: Any) -> None:
        self._results = results
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        file = self._results[name]
        return file.model_copy(update={"rows": [changed(row) for row in file.rows]})

    def settings(self, name: str) -> Any:
        return self[name].part("settings")[0]


def changed(value: Any) -> Any:
    if isinstance(value, dict):
        # These choose rows.
        keys = {"tokens", "length", "context", "seed", "correlation", "head_dim"}
        return {k: v if k in keys else changed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [changed(each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value + type(value)(3)


def figures(table: str) -> list[str]:
    """The numbers of a table, without its header, the names of its rows, links and backquotes."""
    body = "\n".join(line.split("|", 2)[2] for line in table.splitlines()[2:])
    return re.findall(r"\d[\d,.]*", re.sub(r"\]\([^)]*\)|`[^`]*`", "", body))


def test_changed_figures_change_every_table(tables: ModuleType):
    results = tables.Results()
    for name, build in tables.TABLES.items():
        other = Changed(results)
        before, after = build(results), build(other)
        assert other.read and before != after, name
        same = [a for a, b in zip(figures(before), figures(after), strict=False) if a == b]
        # Lengths, and sizes in names of models and methods, stay.
        assert len(same) < 0.7 * len(figures(before)), f"{name}: {same}"


def test_check_names_a_page_whose_file_has_changed(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if path.stem == "qwen_0.5b_prefix_reuse":
            assert "[10.5082, 10.7987]" in text
            text = text.replace("[10.5082, 10.7987]", "[9.5, 9.5]")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    assert tables.main(["--check"]) == 0 and capsys.readouterr().out == ""
    results = tables.Results(tmp_path)
    monkeypatch.setattr(tables, "Results", lambda: results)
    before = (DOCS / "results.md").read_text(encoding="utf-8")
    assert tables.main(["--check"]) == 3
    assert capsys.readouterr().out == "docs/results.md: differs from docs/results\n"
    assert (DOCS / "results.md").read_text(encoding="utf-8") == before
    new = tables.with_tables(before, results)
    assert new == before.replace("17.6 | 10.7 | 1.65x", "17.6 | 9.50 | 1.85x") != before


def test_unknown_table_is_named(tables: ModuleType):
    with pytest.raises(ValueError, match="no table that: "):
        tables.with_tables("<!-- table: that -->\n<!-- end of table -->", tables.Results())


def test_each_result_file_is_linked_from_a_page(tables: ModuleType):
    text = "".join(page.read_text(encoding="utf-8") for page in tables.pages())
    named = set(re.findall(r"\((?:docs/)?results/([\w.]+)\)", text))
    assert named == {path.name for path in FILES}


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.endswith("_compared")], ids=str)
def test_openvino_rows_follow_from_the_prompts_of_their_file(
    result: ModuleType, tables: ModuleType, path: Path
):
    """The script makes the rows that the file has: it resumes from these files."""
    record = importlib.import_module("openvino_record")
    file = result.read(path)
    methods, losses = record.by_task(record.rows_of(file.part("prompt")))
    assert result.labeled("method", methods) == file.part("method")
    assert result.labeled("loss", losses) == file.part("loss")
    sys.modules.pop("openvino_record")
