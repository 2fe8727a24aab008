"""Changes of a layer's attention output, relative to the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from profiling.inside.residual import ResidualStream
from tests.profiling.conftest import tiny


def test_relative_change_through_wrapped_projection_uses_its_whole_map():
    model = tiny("Llama")
    attention = model.model.layers[0].self_attn
    inner, outer = attention.o_proj, nn.Linear(model.config.hidden_size, model.config.hidden_size)
    # As an adapter around a projection; its bias is no part of a change.
    attention.o_proj = nn.Sequential(inner, outer)
    ids = torch.randint(3, 90, (1, 64))
    change = torch.randn(1, inner.in_features)
    with torch.no_grad(), ResidualStream(model) as stream:
        model(ids)
        written = (change @ (outer.weight @ inner.weight).T).square().sum(-1)
        size = model.model.embed_tokens(ids)[0, -1].square().sum()
        torch.testing.assert_close(stream.relative(0, change), written / size)
