"""Mass that a layer's heads keep, against plain softmax: sinks, soft-caps, skipped tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.patterns import LayerPlan, make
from profiling.inside.capture import LayerInputs
from profiling.inside.head_fidelity import dense_attention, layer_fidelity, worked_tiles

LENGTH = 300
PLAN = LayerPlan(
    [make("a_shape", sink=64, window=64), make("dense"), make("block_sparse", blocks=2)] * 2, 2
)


def inputs(sinks: Tensor | None = None, softcap: float | None = None) -> LayerInputs:
    torch.manual_seed(0)
    q = 2 * torch.randn(1, 6, LENGTH, 16)
    k, v = torch.randn(1, 2, LENGTH, 16), torch.randn(1, 2, LENGTH, 16)
    return LayerInputs(
        layer=0, q=q, k=k, v=v, scale=0.25, sliding_window=None, softcap=softcap, sinks=sinks
    )


def weights(given: LayerInputs, mask: Tensor) -> Tensor:
    """Attention weights of every head on a mask's keys, (H, S, S), next to a sink."""
    scores = given.q[0] @ given.k[0].repeat_interleave(3, 0).transpose(1, 2) * given.scale
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if given.sinks is None:
        return scores.softmax(-1)
    column = given.sinks.view(-1, 1, 1).expand(6, LENGTH, 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


@pytest.mark.parametrize(
    "given", [inputs(), inputs(sinks=torch.linspace(-1, 3, 6)), inputs(softcap=2.0)]
)
def test_it_is_what_plain_softmax_says(given: LayerInputs) -> None:
    index = PLAN.build(given.q, given.k, scale=given.scale)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = index.to_mask()[0]
    dense, sparse = weights(given, causal), weights(given, mask)
    values = given.v[0].repeat_interleave(3, 0)
    exact, found = dense @ values, sparse @ values
    measured = layer_fidelity(given, PLAN)
    error = (found - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    # Of the mass on keys alone: a sink is no key.
    kept = ((dense * mask).sum(-1) / dense.sum(-1)).mean(-1)
    torch.testing.assert_close(torch.from_numpy(measured.error), error, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.from_numpy(measured.recall), kept, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.from_numpy(measured.density), index.density()[0])
    assert measured.recall[1] == pytest.approx(1) and measured.recall[0] < 0.95
    torch.testing.assert_close(dense_attention(given)[0][0], exact, atol=1e-4, rtol=1e-3)


def test_a_tile_that_is_skipped_counts_half() -> None:
    given = inputs()
    # Keys that all queries like: the first tile holds next to everything.
    given.q[:, :, :, 0] = 20.0
    given.k[:, :, :64, 0] = 20.0
    patterns = [
        make("skip_softmax", scale_factor=1.0),
        make("skip_softmax", scale_factor=1e-60),
    ] * 3
    plan = LayerPlan(patterns, 2)
    index = plan.build(given.q, given.k, scale=given.scale)
    tiles = worked_tiles(given, index)[0]
    density = torch.from_numpy(layer_fidelity(given, plan).density).double()
    assert tiles.min() < tiles.max() == index.causal_tiles and tiles.min() > index.causal_tiles / 2
    torch.testing.assert_close(
        tiles / index.causal_tiles, density, check_dtype=False, atol=1e-6, rtol=1e-6
    )
