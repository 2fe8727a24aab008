"""One prompt under one method: what a trial says is what generation and teacher forcing say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import artifacts
from profiling.evaluation.methods import Methods
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt, make_prompts
from profiling.quality.forced import negative_log_likelihood
from profiling.quality.method import Method
from profiling.quality.trials import BLOCK
from runtime.fingerprint import fingerprint
from tests.profiling.quality.forcing import forced_answers, generated, trial

DENSE = Method(
    name="dense", make=lambda: None, density=1.0, kept=1.0, identity="dense", evicts=False, sizes=""
)


@pytest.mark.parametrize("task", ["passkey", "two_stage_retrieval"])
def test_an_answer_is_the_models_greedy_one_and_its_fit_that_of_teacher_forcing(
    loaded: LoadedModel, task: str
) -> None:
    prompt = make_prompts(task, loaded.tokenizer, length=700, samples=1, seed=3)[0]
    found = trial(loaded.model, loaded.tokenizer, prompt, DENSE)
    assert found["text"] == generated(loaded.model, loaded.tokenizer, prompt)
    ((fit,),) = forced_answers(loaded.model, loaded.tokenizer, [prompt])
    assert found["nll"] == pytest.approx(fit.mean, rel=1e-4)
    assert found["token_accuracy"] == pytest.approx(fit.token_accuracy)
    assert found["score"] == 0.0


def test_the_models_own_answer_is_right_where_it_is_the_expected_one(loaded: LoadedModel) -> None:
    blank = Prompt(tuple(range(60, 90)), "x" * 6)
    own = generated(loaded.model, loaded.tokenizer, blank)[:4]
    found = trial(loaded.model, loaded.tokenizer, Prompt(blank.input_ids, own), DENSE)
    assert found["score"] == 1.0


def test_the_loss_of_a_text_is_the_models_own(loaded: LoadedModel) -> None:
    ids = torch.randint(0, 256, (1, 600))
    with torch.no_grad():
        loss = loaded.model(ids, labels=ids).loss
    losses = negative_log_likelihood(loaded.model, Prompt(tuple(ids[0].tolist()), None))
    assert losses.shape == (599,) and losses.mean().item() == pytest.approx(loss.item(), rel=1e-4)


def test_a_text_gives_a_loss_for_each_block(loaded: LoadedModel) -> None:
    ids = torch.randint(0, 256, (700,), generator=torch.Generator().manual_seed(0))
    prompt = Prompt(tuple(ids.tolist()), None)
    found = trial(loaded.model, loaded.tokenizer, prompt, DENSE)
    losses = negative_log_likelihood(loaded.model, prompt)
    assert found["blocks"] == pytest.approx(
        [losses[:BLOCK].mean().item(), losses[BLOCK:].mean().item()]
    )
    assert found["forced"] == pytest.approx(losses[-128:].mean().item(), rel=1e-5)
    kept = replace(DENSE, name="x", identity="x", evicts=True)
    decoded = trial(loaded.model, loaded.tokenizer, prompt, kept)
    assert decoded["blocks"] is None
    assert decoded["forced"] == pytest.approx(found["forced"], rel=1e-4)


@pytest.mark.parametrize("name", ["dense+omnikv", "dense+h2o", "dense+streaming", "dense+own"])
def test_a_cache_that_drops_or_chooses_answers_as_it_does_in_generation(
    loaded: LoadedModel, name: str
) -> None:
    own: dict[str, Any] = {}
    if name == "dense+omnikv":
        omnikv = artifacts.OmniKV(filter_layers=(0,), budget=50)
        own["decode"] = artifacts.Decode(omnikv=omnikv)
    if name == "dense+own":
        policy = artifacts.H2O(heavy=30, recent=20, eviction="greedy")
        own["kv_cache"] = artifacts.KVCache(policies={"x": policy}, layers=("x",) * 3)
    artifact = artifacts.Artifact(
        model=fingerprint(loaded.model, name="tiny"),
        search=None,
        patterns={},
        prefill=artifacts.Prefill(dense_below=0, layers=(None,) * 3),
        **own,
    )
    method = Methods(loaded, artifact, share=0.1).make(name, 300)
    prompt = make_prompts("passkey", loaded.tokenizer, length=300, samples=1, seed=3)[0]
    model, tokenizer = loaded.model, loaded.tokenizer
    with method.apply(model):
        found = trial(model, tokenizer, prompt, method)
        assert found["text"] == generated(model, tokenizer, prompt, lambda: method.cache(model))
    whole = trial(model, tokenizer, prompt, DENSE)
    assert found["nll"] != pytest.approx(whole["nll"], rel=1e-3), "nothing was dropped"


def test_a_prompt_with_references_alone_is_scored_and_has_no_fit(loaded: LoadedModel) -> None:
    prompt = Prompt(tuple(range(60, 90)), None, metric="all", references=("zzzzzz",), new_tokens=4)
    found = trial(loaded.model, loaded.tokenizer, prompt, DENSE)
    assert (found["score"], found["nll"], found["token_accuracy"]) == (0.0, None, None)
    assert found["text"] == generated(loaded.model, loaded.tokenizer, prompt)


def test_a_choice_is_right_where_no_wrong_answer_is_as_likely(loaded: LoadedModel) -> None:
    ids = tuple(range(60, 90))
    choices = ("ab", "cde", "xyz w", "q")
    costs = {}
    for choice in choices:
        ((fit,),) = forced_answers(loaded.model, loaded.tokenizer, [Prompt(ids, choice)])
        costs[choice] = fit.mean
    for choice in choices:
        found = trial(loaded.model, loaded.tokenizer, Prompt(ids, choice, choices=choices), DENSE)
        assert found["choice"] == float(choice == min(costs, key=lambda each: costs[each]))
        assert found["nll"] == pytest.approx(costs[choice], rel=1e-4)
    for prompt in (Prompt(ids, "ab"), Prompt(ids, "ab", choices=("c", "d"))):
        assert trial(loaded.model, loaded.tokenizer, prompt, DENSE)["choice"] is None
