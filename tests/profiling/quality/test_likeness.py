"""How near a prefill is to dense attention's, against all logits of plain passes and weights that are written down."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from artifacts import Artifact, AShape, HeadwiseError, Imported, Prefill
from profiling.prompts.prompt import Prompt
from profiling.quality.likeness import Likeness, as_dense
from profiling.quality.method import Method
from runtime import Headwise
from runtime.fingerprint import fingerprint
from tests.runtime.tiny import tiny_model

LENGTH, SCORED = 200, ((50, 52), (120, 121), (180, 183))


def method(made: Headwise | None, **changes: Any) -> Method:
    how: dict[str, Any] = {"density": None, "kept": None, "identity": "", "evicts": False, "sizes": ""}
    return Method(name="m", make=lambda: made, **{**how, **changes})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    ids = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    return Prompt(tuple(ids), None, scored=SCORED)


def all_logits(model: Any, prompt: Prompt) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([prompt.input_ids])).logits[0].double().log_softmax(-1)
    return found


def test_it_is_what_all_logits_say(model: Any, prompt: Prompt) -> None:
    likeness, dense = Likeness(model, prompt), all_logits(model, prompt)
    weight = model.model.layers[0].self_attn.o_proj.weight

    @contextmanager
    def other(given: Any) -> Any:
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        yield
        with torch.no_grad():
            weight.copy_(kept)

    found = likeness.record(method(None, applied=other))
    with other(model):
        moved = all_logits(model, prompt)
    # 200 positions are fewer than the 256 that are compared at the most.
    assert found["kl"] == pytest.approx(float((dense.exp() * (dense - moved)).sum(-1).mean()), rel=2e-2)
    same = dense.argmax(-1) == moved.argmax(-1)
    assert found["same"] == pytest.approx(float(same.double().mean())) and 0 < float(same.double().mean()) < 1
    answers = [bool(same[start - 1 : stop - 1].all()) for start, stop in SCORED]
    assert found["as_dense"] == pytest.approx(sum(answers) / 3)
    itself = likeness.record(method(None))
    assert itself["same"] == itself["as_dense"] == 1 and itself["kl"] == pytest.approx(0, abs=1e-5)
    assert Likeness(model, Prompt(prompt.input_ids, None)).record(method(None))["as_dense"] is None


def test_recall_is_of_patterns_alone(model: Any, prompt: Prompt) -> None:
    likeness = Likeness(model, prompt)
    sizes, source = model.config, Imported(format="minference", file="best.json", sha256="0" * 64, scores="recall")

    def recall(window: int) -> dict[str, float]:
        rows = (("a",) * sizes.num_attention_heads,) * sizes.num_hidden_layers
        prefill = Prefill(dense_below=64, dense_tail=0, layers=rows, imported=source)
        patterns = {"a": AShape(sink=64, window=window)}
        model_info = fingerprint(model, name="tiny")
        made = Headwise(Artifact(model=model_info, search=None, patterns=patterns, prefill=prefill))
        return likeness.recall([method(None), method(made)])

    few, all_of_it = recall(64), recall(256)
    assert list(few) == list(all_of_it) == ["m"] and 0.3 < few["m"] < 0.99
    assert all_of_it["m"] == pytest.approx(1, abs=1e-5)
    assert likeness.recall([method(None)]) == {}


def test_answers_after_a_prompt_are_compared_as_texts(prompt: Prompt) -> None:
    asked = [Prompt((1, 2), "a"), Prompt((1, 3), "b"), Prompt((1, 4), None), prompt]
    own = [{"text": "x"}, {"text": ""}, {"blocks": []}, {"text": "", "as_dense": 0.5}]
    dense = [{"text": "x"}, {"text": "y"}, {"blocks": []}, {"text": ""}]
    found = [record.get("as_dense") for record in as_dense(asked, own, dense)]
    assert found == [1.0, 0.0, None, 0.5]


def test_a_model_without_single_logits_is_refused(prompt: Prompt) -> None:
    class Plain:
        def forward(self, input_ids: Any) -> None: ...

    with pytest.raises(HeadwiseError, match="Plain has no logits_to_keep"):
        Likeness(Plain(), prompt)
