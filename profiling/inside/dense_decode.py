"""Dense attention that prefills by sdpa, and decodes single tokens by Headwise's kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from profiling.inside.capture import attending_with
from runtime.attention.call import logits_of
from runtime.attention.dense import fastest_dense

NAME = "headwise_dense_decode"


def dense_decode(model: Any) -> AbstractContextManager[None]:
    """Attend densely until the context is left: sdpa takes several times as long for one query."""
    from transformers.masking_utils import sdpa_mask

    return attending_with(model, NAME, _attention, sdpa_mask)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    logits = logits_of(scaling, kwargs)
    one_query = query.shape[2] == 1 and (logits.window or attention_mask is None)
    if one_query and logits.sinks is None and logits.softcap is None:
        out = fastest_dense(query, key, value, logits=logits, by="kernel")
        return out.transpose(1, 2), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )[0], None
