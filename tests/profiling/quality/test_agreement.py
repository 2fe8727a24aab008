"""Agreement of a prefill with dense attention, against all logits of plain passes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from profiling.quality.sequences import Reference, TokenSequence
from tests.runtime.tiny import tiny_model

LENGTH, SCORED = 200, ((50, 52), (120, 121), (180, 183))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def sequence() -> TokenSequence:
    ids = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    return TokenSequence(task="", ids=tuple(ids), context=LENGTH, answers=SCORED)


def all_logits(model: Any, sequence: TokenSequence) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([sequence.ids])).logits[0].double().log_softmax(-1)
    return found


def test_it_is_what_all_logits_say(model: Any, sequence: TokenSequence) -> None:
    reference, dense = Reference(model, [sequence]), all_logits(model, sequence)
    weight = model.model.layers[0].self_attn.o_proj.weight

    @contextmanager
    def other() -> Any:
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        yield
        with torch.no_grad():
            weight.copy_(kept)

    found = reference.agreement(0, other())
    with other():
        moved = all_logits(model, sequence)
    # 199 positions are fewer than the 256 that are compared at the most.
    assert found.kl == pytest.approx(
        float((dense.exp() * (dense - moved))[:-1].sum(-1).mean()), rel=2e-2
    )
    same = dense.argmax(-1) == moved.argmax(-1)
    share = float(same[:-1].double().mean())
    assert found.same == pytest.approx(share) and 0 < share < 1
    answers = [bool(same[start - 1 : stop - 1].all()) for start, stop in SCORED]
    assert found.as_dense == pytest.approx(sum(answers) / 3)
    itself = reference.agreement(0, nullcontext())
    assert itself.same == itself.as_dense == 1 and itself.kl == pytest.approx(0, abs=1e-5)
    text = replace(sequence, answers=())
    assert Reference(model, [text]).agreement(0, nullcontext()).as_dense is None
