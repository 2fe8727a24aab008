"""A model over two devices: what a filter layer chose, and where sequences start, goes along.

There is one real device here. The second is "meta", which refuses to mix with the first and
computes no numbers: a forward that ends shows that all that a layer is given lies where the layer
does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache

from runtime.attention.mask import PrefillMask, starts_of

BEHIND = 3


@pytest.fixture
def spread() -> Any:
    """spread(model) -> the model with layers from BEHIND on, the norm and the head on meta, as a
    device map has it."""

    def spread(model: Any) -> Any:
        def move(device: str) -> Any:
            def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
                return tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))

            return hook

        for part in (*model.model.layers[BEHIND:], model.model.norm, model.lm_head):
            part.to("meta").register_forward_pre_hook(move("meta"), with_kwargs=True)
        return model

    return spread


@pytest.mark.parametrize(("padded", "own_cache"), [(True, False), (False, True)])
def test_decode_with_chosen_tokens(
    padded: bool, own_cache: bool, spread: Any, build: Any, decoding: Any, ids: Any
) -> None:
    model, prompt, steps = build(num_hidden_layers=6), ids(150, batch=2), ids(3, batch=2, seed=9)
    loaded = decoding(model)
    real = torch.ones(2, 153, dtype=torch.long)
    real[0, : 30 * padded] = 0
    spread(model)
    with loaded.apply(model, check_weights=False) as handle:
        cache = handle.new_cache() if own_cache else DynamicCache(config=model.config)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        for begin, end in ((0, 150), (150, 151), (151, 152), (152, 153)):
            tokens = torch.cat([prompt, steps], dim=1)[:, begin:end]
            given = {"attention_mask": real[:, :end], "position_ids": positions[:, begin:end]}
            model(tokens, past_key_values=cache, use_cache=True, **given)
        # All six layers in each of three steps: 2 and 4 filter, 3 and 5 are served, over both
        # devices.
        assert handle.settings.calls.total()["chosen"] == 3 * 6


def test_the_mask_of_a_step_says_on_any_device_where_sequences_start(
    spread: Any, build: Any, decoding: Any, ids: Any
) -> None:
    model, prompt = build(num_hidden_layers=6), ids(40, batch=2)
    real = torch.ones(2, 41, dtype=torch.long)
    real[1, :9] = 0
    loaded, seen = decoding(model), []
    spread(model)
    for at in (0, 5):
        model.model.layers[at].self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    with loaded.apply(model, check_weights=False):
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache, attention_mask=real[:, :40])
        seen.clear()
        model(prompt[:, :1], past_key_values=cache, attention_mask=real)
    assert isinstance(seen[0], PrefillMask) and isinstance(seen[-1], PrefillMask)
    here, there = starts_of(seen[0]), starts_of(seen[-1])
    assert isinstance(here, Tensor) and here.tolist() == [0, 9]
    assert isinstance(there, Tensor) and there.device.type == "meta"
