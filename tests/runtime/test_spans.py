"""Prompts with spans whose tokens see each other both ways (images): sparse outside of them, exact within them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

from kernels.patterns import LayerPlan, make
from runtime import Headwise, apply_dense
from runtime.attention.masks import PrefillMask
from runtime.attention.rules import Rule, rule_of
from tests.runtime.conftest import SPARSE, served_by, sparse_rows
from tests.runtime.omnikv import CLOSE
from tests.runtime.tiny import FAMILIES, SIZES

LENGTH = 300
SPANS = [(20, 50), (130, 190)]
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def model() -> Any:
    """A Gemma 3 with images: one layer that slides, and two that see everything."""
    text = {name: size for name, size in SIZES.items() if not name.endswith("token_id")}
    text |= {name: size for name, size in FAMILIES["Gemma3"].items() if name != "config"}
    vision = VISION | {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5 * 2)
    return model


def types(skipped: int = 0, spans: Any = SPANS) -> Tensor:
    """Types of a prompt's tokens (1, LENGTH), `skipped` of padding before them: 1 for those of images."""
    made = torch.zeros(1, LENGTH, dtype=torch.long)
    for begin, end in spans:
        made[:, skipped + begin : skipped + end] = 1
    return made


@contextmanager
def masked(model: Any) -> Iterator[None]:
    """Attention by sdpa, each head under its pattern as a mask, but in spans under the mask that the model made."""
    rows = sparse_rows(model.config.get_text_config())

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        row = rows[module.layer_idx] if module.config is model.config.get_text_config() else None
        if row is None:
            return sdpa_attention_forward(module, q, k, v, mask, **kwargs)
        plan = LayerPlan([make(**SPARSE[name]) for name in row], k.shape[1])
        seen = plan.build(q, k, scale=kwargs["scaling"]).to_mask()
        for begin, end in SPANS if mask is not None else ():
            seen[:, :, begin:end] = mask[:, :, begin:end]
        group = q.shape[1] // k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, repeat_kv(k, group), repeat_kv(v, group), attn_mask=seen, scale=kwargs["scaling"]
        )
        return out.transpose(1, 2).contiguous(), None

    with served_by(model, attention):
        yield


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_text_is_sparse_and_spans_see_themselves(
    backend: str, before: str, model: Any, artifact_for: Any, ids: Any
) -> None:
    given = {"input_ids": ids(LENGTH), "token_type_ids": types()}
    with masked(model):
        expected = model(**given).logits
        causal = model(input_ids=given["input_ids"]).logits
    assert (causal - expected).abs().max() > 0.01, "spans must be seen both ways"
    model.set_attn_implementation(before)
    headwise = Headwise(artifact_for(model))
    with headwise.apply(model, strict=True, backend=backend) as handle:
        torch.testing.assert_close(model(**given).logits, expected, **CLOSE)
        assert handle.stats()["sparse"] == 2
        assert handle.stats()["dense"].get("window by kernel", 0) == (backend == "auto" and before == "sdpa")


def test_padded_prompts_and_the_tokens_after_them(model: Any, artifact_for: Any, ids: Any) -> None:
    prompt, skipped = ids(LENGTH), 40
    short = torch.cat([torch.zeros(1, skipped, dtype=torch.long), prompt[:, :-skipped]], dim=1)
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[1, :skipped] = 0
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    with Headwise(artifact_for(model)).apply(model, strict=True, backend="auto") as handle:

        def answers(tokens: Tensor, kinds: Tensor, **more: Any) -> Tensor:
            found = model.generate(tokens, token_type_ids=kinds, past_key_values=handle.new_cache(), **how, **more)
            return found[:, tokens.shape[1] :]

        kinds = torch.cat([types(), types(skipped)])
        together = answers(torch.cat([prompt, short]), kinds, attention_mask=real)
        alone = [answers(prompt, types()), answers(prompt[:, :-skipped], types()[:, :-skipped])]
        assert torch.equal(together, torch.cat(alone))
        assert handle.stats()["sparse"] == 3 * 2


def test_dense_by_the_kernel_keeps_spans(model: Any, ids: Any) -> None:
    given = {"input_ids": ids(LENGTH), "token_type_ids": types()}
    expected = model(**given).logits
    with apply_dense(model, by="kernel") as applied:
        torch.testing.assert_close(model(**given).logits, expected, **CLOSE)
        assert set(applied.settings.calls.total()) == {"dense by kernel", "window by kernel"}


def test_a_prompt_that_is_mostly_a_span_is_dense(model: Any, artifact_for: Any, ids: Any) -> None:
    given = {"input_ids": ids(LENGTH), "token_type_ids": types(spans=[(10, 210)])}
    expected = model(**given).logits
    with Headwise(artifact_for(model)).apply(model, backend="auto") as handle:
        torch.testing.assert_close(model(**given).logits, expected, **CLOSE)
        assert handle.stats()["sparse"] == 0


def test_spans_are_told_by_what_the_mask_is_made_of() -> None:
    numbers = torch.tensor([[-1, 0, 0, -1, 1, 1], [0, 0, -1, -1, -1, 1]])
    blocks, window = blockwise_overlay(numbers), sliding_window_overlay(3)
    rule = rule_of(and_masks(or_masks(causal_mask_function, blocks), window))
    assert rule is not None and rule.window == 3 and rule.blocks is numbers
    assert rule.spans([(0, 6), (0, 6)]) == (((1, 3), (4, 6)), ((0, 2), (5, 6)))
    assert rule.spans([(0, 6), (2, 5)]) == (((1, 3), (4, 6)), ())
    apart = Rule(blocks=torch.tensor([[0, -1, 0]]))
    assert apart.spans([(0, 3)]) is None and apart.spans([(1, 3)]) == (((2, 3),),)
    for other in (
        and_masks(causal_mask_function, blocks),
        or_masks(blocks, causal_mask_function),
        or_masks(causal_mask_function, blocks, blockwise_overlay(numbers)),
        or_masks(causal_mask_function, lambda b, h, q, k: k < 3),
        blocks,
    ):
        assert rule_of(other) is None


@pytest.mark.parametrize("queries", [(0, 300), (60, 40), (299, 1)])
def test_rows_of_the_mask_are_those_of_the_whole(
    queries: tuple[int, int], model: Any, artifact_for: Any, ids: Any
) -> None:
    masks: list[Any] = []
    text = model.model.language_model.layers[1].self_attn
    with Headwise(artifact_for(model)).apply(model):
        hook = text.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        model(input_ids=ids(LENGTH), token_type_ids=types())
        hook.remove()
    (mask,) = masks
    assert isinstance(mask, PrefillMask)
    first, count = queries
    assert torch.equal(mask.of_queries(first, count), mask.read()[:, :, first : first + count])
