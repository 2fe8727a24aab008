"""One prompt under one method: what a trial says is what generation and teacher forcing say."""

from __future__ import annotations

import pytest
import torch

from profiling.methods import Method
from profiling.models import LoadedModel, load_model
from profiling.prompts import Prompt, make_prompts
from profiling.quality import answer, answer_fit, negative_log_likelihood
from profiling.trials import BLOCK, trial
from tests.search.conftest import save_tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny(tmp_path_factory.mktemp("trials") / "tiny")), dtype="float32")


DENSE = Method(name="dense", make=lambda: None, density=1.0, kept=1.0, identity="dense", evicts=False, sizes="")


@pytest.mark.parametrize("task", ["passkey", "two_stage_retrieval"])
def test_an_answer_is_the_models_greedy_one_and_its_fit_that_of_teacher_forcing(loaded: LoadedModel, task: str) -> None:
    prompt = make_prompts(task, loaded.tokenizer, length=700, samples=1, seed=3)[0]
    found = trial(loaded.model, loaded.tokenizer, prompt, DENSE)
    assert found["text"] == answer(loaded.model, loaded.tokenizer, prompt)
    fit = answer_fit(loaded.model, loaded.tokenizer, prompt)
    assert found["nll"] == pytest.approx(fit.nll, rel=1e-4)
    assert found["token_accuracy"] == pytest.approx(fit.token_accuracy)
    assert found["score"] == 0.0


def test_the_models_own_answer_is_right_where_it_is_the_expected_one(loaded: LoadedModel) -> None:
    blank = Prompt(tuple(range(60, 90)), "x" * 6)
    own = answer(loaded.model, loaded.tokenizer, blank)[:4]
    found = trial(loaded.model, loaded.tokenizer, Prompt(blank.input_ids, own), DENSE)
    assert found["score"] == 1.0


def test_a_text_gives_a_loss_for_each_block(loaded: LoadedModel) -> None:
    ids = torch.randint(0, 256, (700,), generator=torch.Generator().manual_seed(0))
    prompt = Prompt(tuple(ids.tolist()), None)
    found = trial(loaded.model, loaded.tokenizer, prompt, DENSE)
    losses = negative_log_likelihood(loaded.model, prompt)
    assert found["blocks"] == pytest.approx([losses[:BLOCK].mean().item(), losses[BLOCK:].mean().item()])
    assert found["forced"] == pytest.approx(losses[-128:].mean().item(), rel=1e-5)
    kept = Method(name="x", make=lambda: None, density=1.0, kept=1.0, identity="x", evicts=True, sizes="")
    decoded = trial(loaded.model, loaded.tokenizer, prompt, kept)
    assert decoded["blocks"] is None and decoded["forced"] == pytest.approx(found["forced"], rel=1e-4)
