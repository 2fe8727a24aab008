"""Each architecture: a dense artifact changes nothing, a sparse one computes what its index
says."""

import pytest
import torch

from kernels import dispatch
from tests.runtime.tiny import FAMILIES

CLOSE = {"atol": 2e-4, "rtol": 1e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_artifact_is_what_the_model_did_before(family, dtype, build, apply, ids):
    model, prompt = build(family).to(dtype), ids(200, batch=2)
    expected = model(prompt).logits
    with apply(model, dense=True) as handle:
        found = model(prompt).logits
        assert handle.stats()["sparse"] > 0
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, **CLOSE)
    else:
        exact = build(family)(prompt).logits
        error, usual = (found.float() - exact).norm(), (expected.float() - exact).norm()
        assert error < 1.5 * usual + 1e-3


@pytest.mark.parametrize("length", [129, 200, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_is_sdpa_with_the_index_as_mask(family, length, build, apply, masked, ids):
    model, prompt = build(family), ids(length, batch=2)
    dense = model(prompt).logits
    with masked(model):
        expected = model(prompt).logits
    with apply(model, strict=True):
        found = model(prompt).logits
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (found - dense).abs().max() > 1e-2


def test_the_index_is_built_with_the_scale_of_the_model(build, apply, masked, ids):
    model, prompt = build("Gemma3", query_pre_attn_scalar=100_000), ids(600)
    with masked(model):
        expected = model(prompt).logits
    with apply(model, strict=True):
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)


def test_the_fastest_kernel_computes_what_the_reference_does(build, apply, ids):
    model, prompt = build(), ids(300, batch=2)
    probe = torch.randn(1, 4, 300, 64)
    reasons = dispatch.why_not(probe, probe, probe)
    if None not in [reason for name, reason in reasons.items() if name != "reference"]:
        pytest.skip(str(reasons))
    with apply(model, strict=True):
        expected = model(prompt).logits
    with apply(model, strict=True, backend="auto"):
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)


def test_short_prompts_are_bitwise_what_sdpa_gives(build, apply, ids):
    model, prompt = build(), ids(127)
    expected = model(prompt).logits
    with apply(model) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats() == {"sparse": 0, "dense": {"short": 2}}


def test_a_layer_that_slides_is_left_alone(build, apply, ids):
    model = build("Gemma3")
    with apply(model) as handle:
        model(ids(200))
        assert handle.stats() == {"sparse": 2, "dense": {"layer left alone": 1}}


def test_a_model_that_slides_everywhere_is_served_as_before(build, apply, ids, warnings):
    model, prompt = build("Mistral", head_dim=64, sliding_window=40), ids(200)
    expected = model(prompt).logits
    with apply(model) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and "slides" in warnings()[0]
