"""Forwards that are interrupted or nested: the next forward is served as if they had not been."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

from artifacts import HeadwiseError
from runtime.omnikv import decode as omnikv
from tests.runtime.batches import fed
from tests.runtime.omnikv import CLOSE, LAYERS

LENGTH = 150
SECTION: dict[str, Any] = {"selector": "uniform", "window": 3}


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which hooks of torch do not see."""


def interrupted(*_: Any, **__: Any) -> Any:
    raise Interrupted


def after_update(model: Any, cache: Any) -> Any:
    layer = cache.layers[2]
    update = layer.update

    def updated(*args: Any, **kwargs: Any) -> Any:
        update(*args, **kwargs)
        raise Interrupted

    return mock.patch.object(layer, "update", updated)


def before(module: Any) -> Any:
    return module.register_forward_pre_hook(interrupted)


def after(module: Any) -> Any:
    return module.register_forward_hook(interrupted)


# Where a step is interrupted: layer 2 filters for layer 3.
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "after the update": after_update,
    "in the MLP": lambda model, _: before(model.model.layers[2].mlp),
    "after attention": lambda model, _: after(model.model.layers[2].self_attn),
    "before a sparse layer": lambda model, _: before(model.model.layers[3].self_attn),
    "in attention": lambda model, _: mock.patch.object(omnikv, "decode_attention", interrupted),
}


def own_mask_and_plain_cache(model: Any, handle: Any, ids: Any) -> Any:
    """The same numbers of keys as in the interrupted step, of other tokens."""
    cache = DynamicCache(config=model.config)
    causal = torch.ones(1, 1, LENGTH + 1, LENGTH + 1, dtype=torch.bool).tril()
    tokens = ids(LENGTH + 1, seed=5)
    out = model(tokens, attention_mask=causal, past_key_values=cache).logits
    step = torch.ones(1, 1, 1, LENGTH + 2, dtype=torch.bool)
    return out, model(tokens[:, :1], attention_mask=step, past_key_values=cache).logits


def own_mask_without_cache(model: Any, handle: Any, ids: Any) -> Any:
    causal = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril()
    return model(ids(200, seed=5), attention_mask=causal, use_cache=False).logits


def steps(model: Any, ids: Any, cache: Any) -> Any:
    return fed(model, ids(LENGTH + 2, seed=5), (LENGTH, 1), cache)


NEXT: list[Callable[..., Any]] = [
    own_mask_and_plain_cache,
    own_mask_without_cache,
    lambda model, handle, ids: steps(model, ids, DynamicCache(config=model.config)),
    lambda model, handle, ids: model(ids(LENGTH + 1, seed=5), use_cache=False).logits,
    lambda model, handle, ids: steps(model, ids, handle.new_cache(offload="packed")),
]


@pytest.mark.parametrize("place", PLACES)
def test_next_forward_after_interrupted_step_is_unchanged(place, build, decoding, ids):
    model, other = build(**LAYERS), build(seed=1, **LAYERS)
    loaded = decoding(model, **SECTION)
    with loaded.apply(model) as handle, decoding(other, **SECTION).apply(other) as second:
        for follow in NEXT:
            pairs = ((model, handle), (other, second))
            expected = [follow(each, applied, ids) for each, applied in pairs]
            cache = handle.new_cache(offload="packed")
            fed(model, ids(LENGTH), (LENGTH,), cache)
            with PLACES[place](model, cache), pytest.raises(Interrupted):
                model(ids(1), past_key_values=cache)
            assert (model.model.layers[2].self_attn._forward_hooks or None) is None
            for (each, applied), wanted in zip(pairs, expected, strict=True):
                torch.testing.assert_close(follow(each, applied, ids), wanted, atol=0, rtol=0)


@pytest.mark.parametrize("offload", ["never", "packed"])
@pytest.mark.parametrize("at", [2, 3], ids=["in the filter layer", "before a sparse layer"])
def test_nested_forward_leaves_outer_one_unchanged(at, offload, build, decoding, ids):
    """A forward of equally many keys, of the same model and of an assistant, inside another."""
    model, other = build(**LAYERS), build(seed=1, **LAYERS)
    tokens, inner = ids(LENGTH + 3), ids(LENGTH + 3, seed=9)
    with (
        decoding(model, **SECTION).apply(model) as handle,
        decoding(other, **SECTION).apply(other) as second,
    ):
        expected = fed(model, tokens, (LENGTH, 1), handle.new_cache(offload=offload))
        caches = [DynamicCache(config=model.config), handle.new_cache(offload=offload)]
        for cache in caches:
            fed(model, inner[:, :LENGTH], (LENGTH,), cache)
        assistant = second.new_cache()
        fed(other, inner[:, :LENGTH], (LENGTH,), assistant)
        cache = handle.new_cache(offload=offload)
        fed(model, tokens[:, :LENGTH], (LENGTH,), cache)
        nested = []

        def hook(*_):
            if nested:
                return
            nested.append(True)
            for each in caches:
                model(inner[:, LENGTH : LENGTH + 1], past_key_values=each)
            other(inner[:, LENGTH : LENGTH + 1], past_key_values=assistant)

        with model.model.layers[at].self_attn.register_forward_pre_hook(hook):
            actual = fed(model, tokens[:, LENGTH:], (1,), cache)
    assert nested
    torch.testing.assert_close(actual, expected[:, LENGTH:], **CLOSE)


def test_hooks_end_with_application_and_are_in_no_copy(build, decoding, ids):
    model, tokens = build(**LAYERS), ids(LENGTH + 1)
    expected = fed(model, tokens, (LENGTH, 1))
    with decoding(model).apply(model):
        assert all(layer.self_attn._forward_pre_hooks for layer in model.model.layers)
        stored = pickle.dumps(model)
        assert b"runtime." not in stored
        for twin in (copy.deepcopy(model), pickle.loads(stored)):
            assert torch.equal(fed(twin, tokens, (LENGTH, 1)), expected)
            decoding(twin).apply(twin).undo()
        model.set_attn_implementation("eager")
        torch.testing.assert_close(fed(model, tokens, (LENGTH, 1)), expected, **CLOSE)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_apply_rejects_attention_that_hands_nothing_on(build, decoding):
    model = build(**LAYERS)
    attention = model.model.layers[3].self_attn
    forward = attention.forward
    attention.forward = lambda hidden_states, past_key_values: forward(hidden_states)
    with pytest.raises(HeadwiseError, match=r"forward takes no \*\*kwargs for its attention"):
        decoding(model).apply(model)
    del attention.forward
    decoding(model).apply(model).undo()
