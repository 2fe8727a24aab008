"""Streams by their definition: in any chunks, after any kill, against plain forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from profiling.evaluation.intervals import share_of
from profiling.prompts.tokens import Encoder
from profiling.stream import Config, measure
from profiling.token_stream import BlockStats, Series, TokenStream, row_of, text_stream
from tests.profiling.tokenizers import byte_level

STREAMING = "streaming:sinks=2,window=22"
POLICIES = (
    "full",
    STREAMING,
    "streaming:sinks=0,window=24",
    "streaming:sinks=2,window=22,positions=original",
    "h2o:heavy=8,recent=16",
)


@pytest.fixture
def config(tmp_path):
    """config(out, **changes) of a small run."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The clerk counted {7 * n % 101} boats." for n in range(60)))

    def config(out="out", **changes):
        settings = {"tokens": 90, "policies": POLICIES, "recompute": 24, "text": text}
        settings |= {"chunk": 32, "block": 32, "stride": 3, "dtype": "float32"}
        return Config(model="tiny", out=tmp_path / out, **{**settings, **changes})

    return config


def test_stream_of_any_chunk_size_is_the_same(loaded, config):
    policies = (STREAMING, f"{STREAMING},positions=original")
    changes = {"block": 40, "policies": policies, "recompute": 0}
    alone, chunked = (
        measure(config(f"out{chunk}", chunk=chunk, **changes), loaded)[1] for chunk in (1, 20)
    )
    assert list(alone["blocks"]) == list(chunked["blocks"]) == list(policies)
    for name in policies:
        one, many = alone["blocks"][name], chunked["blocks"][name]
        assert many["end"] == [40, 80, 90]
        np.testing.assert_allclose(many["nll"], one["nll"], rtol=1e-4)
        assert many["cache_bytes"] == one["cache_bytes"] and len(set(one["cache_bytes"])) == 1


def test_stream_methods_equal_plain_forwards(loaded, config):
    """Before the window is full all methods are dense."""
    stream = config(stride=1, block=8, chunk=8, tokens=60)
    rows, record = measure(stream, loaded)
    by_name = {row.method: row for row in rows}
    ids = torch.tensor([text_stream(Encoder(loaded.tokenizer), stream.text, 60, 1).ids])
    with torch.no_grad():
        dense = cross_entropy(loaded.model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
        windows = [loaded.model(ids[:, max(0, t - 24) : t]).logits[0, -1] for t in range(1, 61)]
        recomputed = cross_entropy(torch.stack(windows), ids[0, 1:], reduction="none")
    for name, losses in (("full", dense), ("recomputed", recomputed)):
        assert by_name[name].perplexity == pytest.approx(losses.mean().exp().item(), rel=1e-4)
        # Blocks of 8 tokens: the first quarter of 60 is one of them.
        first = losses[:8].mean().exp().item()
        assert by_name[name].quarters[0] == pytest.approx(first, rel=1e-4)
    blocks = {name: np.array(values["nll"]) for name, values in record["blocks"].items()}
    for name, values in blocks.items():
        np.testing.assert_allclose(values[:3], blocks["full"][:3], rtol=1e-4, err_msg=name)
        if name != "full":
            assert not np.allclose(values[4:], blocks["full"][4:], rtol=1e-3), name
    expected = (dense - recomputed)[24:].mean().exp().item()
    assert by_name["full"].ratio == pytest.approx(expected, rel=1e-4)
    assert by_name["recomputed"].ratio is None and by_name[STREAMING].low is not None
    assert record["blocks"]["recomputed"]["cache_bytes"] == [None] * 8


def test_ratio_interval_has_one_sample_a_window():
    """4 windows of 10 equal tokens are 4 samples, not 40."""
    apart = np.repeat([0.1, 0.3, 0.2, 0.4], 10)
    stream = TokenStream(ids=tuple(range(51)), probes=tuple(range(11, 51)), name="t")
    both = []
    for name, values in (("recomputed", np.zeros(40)), ("streaming", apart)):
        block = BlockStats(nll=1.0, tokens=40, probed=values.tolist())
        both.append(Series(method=name, ends=(51,), blocks=(block,)))
    base, streaming = both
    row = row_of(streaming, base, stream, window=10)
    # The last token, 50, begins a fifth window; the rest is Student's interval of ratios.
    windows = [apart[:9], apart[9:19], apart[19:29], apart[29:39], apart[39:]]
    expected = share_of([float(part.sum()) for part in windows], [len(part) for part in windows])
    assert row.ratio == pytest.approx(np.exp(0.25))
    assert (row.low, row.high) == pytest.approx((np.exp(expected.low), np.exp(expected.high)))
    by_token = 1.96 * float(apart.std(ddof=1)) / 40**0.5
    assert row.low is not None and row.low < np.exp(0.25 - 2 * by_token)
    alone = row_of(base, base, stream, window=10)
    assert alone.ratio is alone.low is None
    assert row_of(streaming, base, stream, window=100).ratio is None


def test_text_stream_repeats_a_short_text(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("The river and the old clerk.")
    encode = Encoder(byte_level(bos=True))
    ids = encode(text.read_text())
    stream = text_stream(encode, text, 3 * len(ids), 1)
    assert stream.ids == (*encode.prefix, *(ids * 3)) and stream.repeats == 2
