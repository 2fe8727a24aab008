"""Other tools' files with anything in them: read as what they are, or refused in one line; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from artifacts import ArtifactError, load_pair
from artifacts.commands.convert import Config, run
from artifacts.lint import Case, lint

FILES = Path(__file__).parent / "interop"
MODEL = FILES / "model.json"

numbers = st.one_of(st.integers(-2, 2**33), st.floats(allow_nan=True), st.booleans())
anything = st.recursive(
    st.one_of(st.none(), numbers, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=8,
)
sizes = st.one_of(st.integers(1, 9000), numbers, st.tuples(st.floats(0, 1), st.integers(1, 9000)), anything)
names = st.sampled_from(["vertical_and_slash", "stream_llm", "block_sparse", "flex_vertical_and_slash", "dense", ""])
entries = st.one_of(st.tuples(names, sizes, sizes, numbers), st.lists(anything, max_size=5), anything)
heads = st.one_of(st.integers(0, 5).map(str), st.text(max_size=3))
layers = st.lists(st.one_of(st.dictionaries(heads, entries, max_size=5), anything), max_size=4)
entry = st.tuples(
    st.sampled_from(["vertical_and_slash", "stream_llm", "block_sparse"]),
    st.integers(1, 40_000),
    st.integers(1, 40_000),
    st.one_of(st.none(), st.floats(0, 1), st.integers(0, 10**7)),
)
row = st.fixed_dictionaries({}, optional={str(head): entry for head in range(4)})
whole = st.fixed_dictionaries({str(head): entry for head in range(4)})
good = st.lists(row, max_size=1).flatmap(lambda rows: whole.map(lambda full: [*rows, full]))


def convert(folder: str, text: bytes, suffix: str) -> Path | None:
    """Convert in a folder of its own and look at what came out; None where it was refused, as it should be."""
    file, out = Path(folder) / f"file.{suffix}", Path(folder) / "cfg.yaml"
    file.write_bytes(text)
    try:
        assert run(Config(file=file, out=out, config=MODEL)).status == 0
    except ArtifactError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000 and not out.exists()
        return None
    artifact, arrays = load_pair(out)
    lint(Case(artifact=artifact, arrays=arrays))
    return out


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(layers)
@example([{"0": ["vertical_and_slash", 2**31 - 1, 2**31 - 1, 1e308]}])
@example([{"0": ["flex_vertical_and_slash", [1, 1], [1.0, 2**31 - 1], None]}])
@example([{"0": ["stream_llm", True, 1, 0]}])
def test_lists_of_head_patterns(made: Any) -> None:
    with TemporaryDirectory() as folder:
        convert(folder, json.dumps(made).encode(), "json")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(good)
def test_what_is_read_is_written_again(made: list[dict[str, list[Any]]]) -> None:
    with TemporaryDirectory() as folder:
        out = convert(folder, json.dumps(made).encode(), "json")
        assert out is not None
        run(Config(file=out, out=out.with_name("back.json"), target="minference"))
        back = json.loads(out.with_name("back.json").read_text())
    for layer, heads in enumerate(made):
        for head, was in heads.items():
            assert back[layer][head] == list(was)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60), st.sampled_from(["json", "tsv"]))
def test_bytes(text: bytes, suffix: str) -> None:
    with TemporaryDirectory() as folder:
        convert(folder, text, suffix)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.one_of(st.floats(0, 1), st.floats(), st.text(max_size=3)), max_size=3), max_size=3))
@example([[0.0, 1.0], [1.0, 0.0]])
def test_tables(made: list[list[Any]]) -> None:
    with TemporaryDirectory() as folder:
        convert(folder, "\n".join("\t".join(map(str, row)) for row in made).encode(errors="replace"), "tsv")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(sorted([*json.loads(MODEL.read_text()), "layer_types", "text_config", "head_dim"])), anything
    )
)
def test_configurations(changes: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        config, out = Path(folder) / "config.json", Path(folder) / "cfg.yaml"
        config.write_text(json.dumps(json.loads(MODEL.read_text()) | changes))
        try:
            run(Config(file=FILES / "head_patterns.json", out=out, config=config))
        except ArtifactError as error:
            assert "\n" not in str(error) and not out.exists()
        else:
            load_pair(out)
