"""Tables of KV heads' scores: which heads keep everything is what KVzip and DuoAttention keep.

Their rules are written out here as they run them: on scores repeated for each token of a context, and with NumPy's
quantile.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.interop import kvzip
from artifacts.interop.shape import Given
from artifacts.interop.source import Source

LAYERS = 8
# Few values, so that heads tie.
TIED = st.lists(st.integers(0, 20).map(lambda n: n / 20), min_size=LAYERS, max_size=LAYERS * 12).filter(
    lambda values: len(values) % LAYERS == 0
)
PERCENT = st.integers(0, 100)


def shape(heads: int, **options: float) -> Given:
    return Given(heads=heads, kv_heads=heads, head_dim=64, max_positions=8192, **options)


def rows_of(values: list[float]) -> list[list[float]]:
    width = len(values) // LAYERS
    return [values[layer * width : (layer + 1) * width] for layer in range(LAYERS)]


def kept_by(made) -> list[bool]:
    return [name == "full" for row in made.artifact.kv_cache.layers for name in row]


def tensor_file(values: list[float]) -> Source:
    import torch

    stream = io.BytesIO()
    torch.save(torch.tensor(rows_of(values), dtype=torch.float64), stream)
    return Source(path=Path("toy-qa-0.pt"), data=stream.getvalue())


def kept_by_kvzip(values: list[float], ratio: float, context: int) -> list[bool]:
    """KVzip's `_threshold` on scores that are repeated `context` times."""
    if ratio >= 1:
        return [True] * len(values)
    entries = sorted((value for value in values for _ in range(context)), reverse=True)
    cut = entries[max(int(len(entries) * ratio) - 1, 0)]
    return [value > cut for value in values]


@settings(max_examples=60, deadline=None)
@given(values=TIED, sparsity=PERCENT, context=st.integers(1000, 1500))
def test_kvzip_keeps_the_heads_that_kvzip_keeps(values, sparsity, context):
    made = kvzip.read(tensor_file(values), shape(len(values) // LAYERS, sparsity=sparsity / 100))
    assert kept_by(made) == kept_by_kvzip(values, (100 - sparsity) / 100, context)


def test_of_256_heads_kvzip_keeps_153_at_a_ratio_of_0_6():
    made = kvzip.read(tensor_file([(head + 1) / 256 for head in range(256)]), shape(32))
    assert sum(kept_by(made)) == 153


@pytest.mark.parametrize("sparsity", [0.0, 0.01, 0.37, 0.5, 0.99, 1.0])
def test_the_ratio_that_an_export_names_cuts_where_the_artifact_does(sparsity):
    values = [math.sin(head) ** 2 for head in range(40)]
    made = kvzip.read(tensor_file(values), shape(5, sparsity=sparsity))
    written = kvzip.write(made.artifact, made.arrays, Path("back.pt"))
    (advice,) = (note.what for note in written.report.notes if note.what.startswith("serve it"))
    ratio = float(advice.removeprefix("serve it with a ratio of "))
    assert kept_by_kvzip(values, ratio, 1000) == kept_by(made)
