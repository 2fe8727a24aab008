"""How far predictions drift, against all logits of a pass in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div

from artifacts import HeadwiseError
from profiling.prompts.prompt import Prompt
from profiling.quality.logits import DenseLogits, Drift
from tests.runtime.tiny import tiny_model

LENGTHS = (100, 40)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [Prompt(tuple(torch.randint(3, 97, (n,), generator=generator).tolist()), None) for n in LENGTHS]


def all_logits(model: Any, prompt: Prompt) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt.input_ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("places", [None, 7])
def test_divergence_and_loss_are_those_of_all_logits(model: Any, prompts: list[Prompt], places: int | None) -> None:
    logits = DenseLogits(model, prompts, places=places)
    dense = [all_logits(model, prompt) for prompt in prompts]
    weight = model.model.layers[0].self_attn.o_proj.weight
    before = weight.data.clone()
    weight.data *= 3
    try:
        drift = logits.drift()
        found = [all_logits(model, prompt) for prompt in prompts]
    finally:
        weight.data = before
    kl, loss, dense_loss = [], [], []
    for prompt, was, now in zip(prompts, dense, found, strict=True):
        count = min(places or len(prompt.input_ids), len(prompt.input_ids))
        at = torch.linspace(0, len(prompt.input_ids) - 1, count).long()
        assert at[-1] == len(prompt.input_ids) - 1
        kl.append(kl_div(now, was, log_target=True, reduction="none").sum(-1)[at])
        targets = torch.tensor([*prompt.input_ids[1:], 0])
        for losses, of in ((loss, now), (dense_loss, was)):
            one = -of.gather(1, targets[:, None])[:, 0]
            one[-1] = float("nan")
            losses.append(one[at])
    np.testing.assert_allclose(drift.kl, torch.cat(kl), atol=2e-3, rtol=1e-2)
    np.testing.assert_allclose(drift.loss, torch.cat(loss), atol=1e-4)
    np.testing.assert_allclose(drift.dense_loss, torch.cat(dense_loss), atol=4e-3)
    assert drift.mean_kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-2) and drift.mean_kl > 0.01
    ratio = float((torch.cat(loss) - torch.cat(dense_loss)).nanmean().exp())
    assert drift.perplexity_ratio == pytest.approx(ratio, rel=2e-3)


def test_prompts_are_learnt_and_compared_one_by_one(model: Any, prompts: list[Prompt]) -> None:
    whole, parts = DenseLogits(model, prompts), DenseLogits(model, prompts, at_once=False)
    assert not parts.known and parts.learn(1) and not parts.learn(1) and set(parts.known) == {1}
    weight = model.model.layers[0].self_attn.o_proj.weight
    before = weight.data.clone()
    with pytest.raises(KeyError):
        parts.drift([0])
    while parts.learn():
        pass
    assert set(parts.known) == set(range(len(prompts)))
    weight.data *= 3
    try:
        wanted, second, first = whole.drift(), parts.drift([1]), parts.drift([0])
        rest = [parts.drift([i]) for i in range(2, len(prompts))]
    finally:
        weight.data = before
    found = Drift.joined([first, second, *rest])
    for name in ("kl", "loss", "dense_loss"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def test_a_model_left_as_it_is_has_not_drifted(model: Any, prompts: list[Prompt]) -> None:
    drift = DenseLogits(model, prompts).drift()
    assert drift.mean_kl < 1e-3 and drift.perplexity_ratio == pytest.approx(1, abs=1e-3)
    # Each prompt has a last token, after which nothing is known.
    assert np.isnan(drift.loss).sum() == np.isnan(drift.dense_loss).sum() == len(LENGTHS)


def test_tokens_that_a_model_forbids_do_not_count(model: Any, prompts: list[Prompt]) -> None:
    def forbid(head: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(-1, torch.tensor([0, 1]), torch.finfo(output.dtype).min)

    handle = model.lm_head.register_forward_hook(forbid)
    try:
        drift = DenseLogits(model, prompts).drift()
    finally:
        handle.remove()
    assert np.isfinite(drift.kl).all() and drift.mean_kl < 1e-3


def test_a_model_without_logits_to_keep_is_told(prompts: list[Prompt]) -> None:
    class Whole(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> None:
            raise AssertionError

    with pytest.raises(HeadwiseError, match="Whole has no logits_to_keep"):
        DenseLogits(Whole(), prompts)
