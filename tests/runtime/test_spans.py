"""Prompts with spans whose tokens see each other both ways (images): served densely, said once, and
right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from artifacts import HeadwiseError
from runtime import Headwise, apply_dense
from runtime.attention.layout import NOT_CAUSAL
from tests.runtime.omnikv import CLOSE
from tests.runtime.tiny import FAMILIES, SIZES

LENGTH = 300
SPANS = [(20, 50), (130, 190)]
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def model() -> Any:
    """A Gemma 3 with images: one layer that slides, and two that see everything."""
    text = {name: size for name, size in SIZES.items() if not name.endswith("token_id")}
    text |= {name: size for name, size in FAMILIES["Gemma3"].items() if name != "config"}
    vision = VISION | {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5 * 2)
    return model


def types(skipped: int = 0) -> Tensor:
    """Types of a prompt's tokens (1, LENGTH), `skipped` of padding before them: 1 for those of
    images."""
    made = torch.zeros(1, LENGTH, dtype=torch.long)
    for begin, end in SPANS:
        made[:, skipped + begin : skipped + end] = 1
    return made


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_prompts_with_images_are_dense_and_right(
    backend: str, before: str, model: Any, artifact_for: Any, ids: Any, warnings: Any
) -> None:
    model.set_attn_implementation(before)
    given = {"input_ids": ids(LENGTH), "token_type_ids": types()}
    expected = model(**given).logits
    causal = model(input_ids=given["input_ids"]).logits
    assert (causal - expected).abs().max() > 0.01, "spans must be seen both ways"
    headwise = Headwise(artifact_for(model))
    with headwise.apply(model, backend=backend) as handle:
        for _ in range(2):
            torch.testing.assert_close(model(**given).logits, expected, **CLOSE)
        assert handle.stats() == {"sparse": 0, "dense": {NOT_CAUSAL: 4, "layer left alone": 2}}
        # Text alone is sparse as ever.
        model(input_ids=given["input_ids"])
        assert handle.stats()["sparse"] == 2
    assert warnings() == [f"serving densely: {NOT_CAUSAL}"]
    with (
        headwise.apply(model, strict=True, backend=backend),
        pytest.raises(HeadwiseError, match="not causal"),
    ):
        model(**given)


def test_padded_prompts_and_the_tokens_after_them(model: Any, artifact_for: Any, ids: Any) -> None:
    prompt, skipped = ids(LENGTH), 40
    short = torch.cat([torch.zeros(1, skipped, dtype=torch.long), prompt[:, :-skipped]], dim=1)
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[1, :skipped] = 0
    kinds = torch.cat([types(), types(skipped)])
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    how |= {"token_type_ids": kinds, "attention_mask": real}
    expected = model.generate(torch.cat([prompt, short]), **how)
    with Headwise(artifact_for(model)).apply(model, backend="auto") as handle:
        found = model.generate(
            torch.cat([prompt, short]), past_key_values=handle.new_cache(), **how
        )
    assert torch.equal(found, expected)


def test_dense_by_the_kernel_keeps_spans(model: Any, ids: Any) -> None:
    given = {"input_ids": ids(LENGTH), "token_type_ids": types()}
    expected = model(**given).logits
    with apply_dense(model, by="kernel"):
        torch.testing.assert_close(model(**given).logits, expected, **CLOSE)
