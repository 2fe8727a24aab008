"""Dense attention with decode by Headwise's kernel answers as the model does."""

from __future__ import annotations

import pytest
import torch

from profiling.inside.dense_decode import dense_decode
from tests.profiling.conftest import tiny
from tests.profiling.inside.test_capture import tokens


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Llama4"])
def test_dense_decode_logits_are_the_models_own(family):
    model, ids = tiny(family), tokens(150)
    with torch.no_grad():
        dense = model(ids).logits
        with dense_decode(model):
            first = model(ids[:, :-9], use_cache=True)
            torch.testing.assert_close(first.logits, dense[:, :-9])
            cache = first.past_key_values
            rows = [
                model(part, past_key_values=cache, use_cache=True).logits
                for part in ids[:, -9:].split([6, 1, 1, 1], 1)
            ]
        torch.testing.assert_close(model(ids).logits, dense)
    torch.testing.assert_close(torch.cat(rows, dim=1), dense[:, -9:], atol=1e-4, rtol=1e-3)
