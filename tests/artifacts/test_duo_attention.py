"""Tables of KV heads' scores: which heads keep everything is what DuoAttention keeps.

Its rule is written out here as it runs it, with NumPy's quantile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.interop import duo_attention
from artifacts.interop.shape import ImportOptions
from artifacts.interop.source import Source

LAYERS = 8
# Few values, so that heads tie.
TIED = st.lists(
    st.integers(0, 20).map(lambda n: n / 20), min_size=LAYERS, max_size=LAYERS * 12
).filter(lambda values: len(values) % LAYERS == 0)
PERCENT = st.integers(0, 100)


def shape(heads: int, **options: float) -> ImportOptions:
    return ImportOptions(heads=heads, kv_heads=heads, head_dim=64, max_positions=8192, **options)


def rows_of(values: list[float]) -> list[list[float]]:
    width = len(values) // LAYERS
    return [values[layer * width : (layer + 1) * width] for layer in range(LAYERS)]


def kept_by(result) -> list[bool]:
    return [name == "full" for row in result.artifact.kv_cache.layers for name in row]


def duo_table(values: list[float]) -> Source:
    text = "\n".join("\t".join(map(repr, row)) for row in rows_of(values))
    return Source(path=Path("nowhere/full_attention_heads.tsv"), data=text.encode())


def import_duo(values: list[float], **options: float):
    return duo_attention.read(duo_table(values), shape(len(values) // LAYERS, **options))


def kept_by_duo_attention(values: list[float], sparsity: float, seed: int) -> list[bool]:
    """DuoAttention's rule: noise of up to 1e-6 on each value, then NumPy's quantile."""
    noisy = np.array(values) + np.random.default_rng(seed).uniform(0, 1e-6, len(values))
    if sparsity >= 1:
        return [False] * len(values)
    if sparsity <= 0:
        return [True] * len(values)
    return (noisy >= np.quantile(noisy, sparsity)).tolist()


@settings(max_examples=100, deadline=None)
@given(order=st.permutations(range(LAYERS * 6)), sparsity=PERCENT)
def test_import_duo_without_ties_streams_ceil_of_the_fraction(order, sparsity):
    values = [number / 1000 for number in order]
    result = import_duo(values, sparsity=sparsity / 100)
    assert kept_by(result) == kept_by_duo_attention(values, sparsity / 100, seed=0)
    streaming = kept_by(result).count(False)
    # ceil(s (n - 1)), in whole numbers.
    assert streaming == (
        len(values) if sparsity == 100 else -(-sparsity * (len(values) - 1) // 100)
    )
    assert result.report.exact == len(values) - streaming


@settings(max_examples=60, deadline=None)
@given(values=TIED, sparsity=st.integers(1, 99))
def test_import_duo_with_ties_streams_as_many_heads_and_reports_them(values, sparsity):
    result = import_duo(values, sparsity=sparsity / 100)
    draws = [kept_by_duo_attention(values, sparsity / 100, seed) for seed in range(8)]
    ours = kept_by(result)
    assert {draw.count(False) for draw in draws} == {ours.count(False)}
    ties = sum(note.heads for note in result.report.notes if note.what.startswith("tie at the cut"))
    differing = sum(any(draw[head] != ours[head] for draw in draws) for head in range(len(values)))
    at_the_cut = max(value for value, kept in zip(values, ours, strict=True) if not kept)
    assert differing <= ties and ties in (0, values.count(at_the_cut))


def test_import_duo_with_ties_streams_the_first_heads():
    # As in Llama-2-7B-32K's table at 0.25: 300 of 1,024 values are 0.
    values = [0.0 if head % 3 == 0 and head < 900 else 1.0 for head in range(1024)]
    result = import_duo(values, sparsity=0.25)
    streaming = [head for head, kept in enumerate(kept_by(result)) if not kept]
    assert streaming == list(range(0, 768, 3)) and len(streaming) == 256
    (note,) = (note for note in result.report.notes if "DuoAttention draws" in note.what)
    assert (note.effect, note.heads) == ("chooses otherwise", 300)
    assert result.report.exact == 1024 - 300 and result.report.lossy


@pytest.mark.parametrize("window", [1, 2, 257])
def test_export_duo_recent_size_is_one_less_than_the_window(tmp_path, window):
    result = import_duo([0.0, 1.0] * LAYERS, window=window)
    written = duo_attention.write(
        result.artifact, result.arrays, tmp_path / "full_attention_heads.tsv"
    )
    for path, content in written.files.items():
        path.write_bytes(content)
    back = duo_attention.read(Source.read(tmp_path / "full_attention_heads.tsv"), shape(2))
    (policy,) = (
        policy for policy in back.artifact.kv_cache.policies.values() if policy.kind == "streaming"
    )
    assert policy.window == max(window, 2)
    assert any("which is the least" in note.what for note in written.report.notes) == (window == 1)
