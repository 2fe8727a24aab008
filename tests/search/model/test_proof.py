"""Looks, bounds and faults of a proof, on losses that a test writes down or draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from search.model.limits import Limits
from search.model.losses import ContextLoss
from search.model.proof import ERROR, KINDS, Kind, Proof, bound, contexts_needed, prove

LIMITS = Limits()
LARGE = (0.2, 0.5, 0.9, 1.0)


def answers(losses: Sequence[float], correct: float = 50.0) -> list[ContextLoss]:
    """Contexts of 100 answers that lose these fractions of the correct ones."""
    return [
        ContextLoss(
            task="facts",
            digest=f"{at}",
            kl=0.01,
            tokens=200.0,
            answers=100,
            dense_right=round(correct),
            clear=correct,
            fall=loss * correct,
        )
        for at, loss in enumerate(losses)
    ]


def windows(rises: Sequence[float]) -> list[ContextLoss]:
    return [
        ContextLoss(task="prose", digest=f"w{at}", kl=0.01, text=math.log1p(rise))
        for at, rise in enumerate(rises)
    ]


class Contexts:
    """Hands out contexts in order; `taken` lists (kind, asked, given)."""

    def __init__(self, answer: Sequence[ContextLoss], text: Sequence[ContextLoss] = ()) -> None:
        self.kinds: list[Kind] = ["answer"] * bool(answer) + ["text"] * bool(text)
        self.left: dict[Kind, list[ContextLoss]] = {"answer": list(answer), "text": list(text)}
        self.taken: list[tuple[Kind, int, int]] = []

    def __call__(self, kind: Kind, contexts: int) -> Sequence[ContextLoss]:
        given = self.left[kind][:contexts]
        del self.left[kind][:contexts]
        self.taken.append((kind, contexts, len(given)))
        return given

    def prove(self, limits: Limits = LIMITS, error: float = ERROR) -> Proof:
        return prove(self, limits, kinds=self.kinds, error=error)


def steady(value: float, spread: float, count: int = 16) -> list[float]:
    """Values around a mean."""
    return [value + spread * (-1) ** at for at in range(count)]


def test_each_kind_is_measured_until_it_is_proven():
    contexts = Contexts(answers(steady(0.01, 0.01), 200), windows(steady(0.005, 0.001)))
    proof = contexts.prove()
    assert proof.verdict.proven and proof.fault is None and proof.verdict.why is None
    # The text is proven by the first look, the answers by the second.
    assert contexts.taken == [("text", 4, 4), ("answer", 4, 4), ("answer", 4, 4)]
    assert (proof.verdict.windows, proof.verdict.contexts) == (4, 8)
    assert proof.verdict.lost == pytest.approx(0.01)
    assert 0.01 < proof.verdict.lost_high <= 0.05
    assert 0.005 < proof.verdict.perplexity_high <= 0.03
    assert (proof.verdict.max_lost, proof.verdict.max_perplexity) == (0.05, 0.03)


def test_loss_beyond_its_limit_ends_the_first_look():
    contexts = Contexts(answers(steady(0.01, 0.01)), windows(steady(0.14, 0.01)))
    proof = contexts.prove()
    assert not proof.verdict.proven and contexts.taken == [("text", 4, 4)]
    assert proof.fault.startswith("prose: perplexity rises by 14.00% (")
    assert "the limit is 3.00% (--max-perplexity)" in proof.fault
    assert proof.verdict.lost is None and proof.ratios["text"] == pytest.approx(4.66, rel=0.01)


def test_loss_above_its_limit_by_chance_ends_the_second_look():
    """At the first look four contexts say little; at the second the rest could hardly prove it."""
    contexts = Contexts(answers(steady(0.06, 0.05)))
    proof = contexts.prove()
    assert [given for kind, _, given in contexts.taken if kind == "answer"] == [4, 4]
    assert proof.fault == "6.0% fewer correct answers, the limit is 5.0% (--max-lost)"


def test_last_look_that_proves_nothing_names_contexts_that_would():
    contexts = Contexts(answers(steady(0.02, 0.06)))
    proof = contexts.prove()
    assert [given for kind, _, given in contexts.taken if kind == "answer"] == [4, 4, 8]
    why = proof.verdict.why
    assert proof.fault is None and not proof.verdict.proven
    assert (
        why.startswith("up to ") and " after 16 contexts, the limit is 5.0% (--max-lost); " in why
    )
    needed = int(why.split("about ")[1].split()[0])
    more = Contexts(answers(steady(0.02, 0.06, needed)))
    (high,) = {bound("answer", more.left["answer"], LIMITS, ERROR * 0.6).high}
    assert 0.04 < high <= 0.05


def test_loss_near_its_limit_names_no_number_of_contexts():
    proof = Contexts(answers(steady(0.049, 0.06))).prove()
    assert not proof.verdict.proven and "would prove" not in proof.verdict.why


def test_contexts_needed_is_none_beyond_the_limit():
    interval = bound("answer", answers(steady(0.06, 0.01)), LIMITS, 0.01)
    assert contexts_needed("answer", interval, 0.05, 800.0, 0.01) is None


@pytest.mark.parametrize("correct", [5, 18])
def test_few_correct_answers_prove_nothing_though_none_is_lost(correct):
    """Of 80 answers none is lost in 2% of cases where one in twenty is."""
    assert not Contexts(answers([0.0] * 4, correct)).prove().verdict.proven
    assert bound("answer", answers([0.0] * 4, correct), LIMITS, 0.005).high > 0.05


def test_contexts_that_happen_to_be_alike_have_a_bound():
    """Equal losses have no spread, which says nothing of other contexts."""
    interval = bound("answer", answers([0.01] * 8, 1000), LIMITS, 0.015)
    assert interval.value == pytest.approx(0.01) and interval.high > 0.03


def test_counts_that_exceed_the_limit_prove_nothing():
    """A model that is surer of all its answers may still get fewer of them right."""
    surer = [replace(context, lost=6, won=1) for context in answers(steady(-0.02, 0.01), 50)]
    proof = Contexts(surer).prove()
    assert not proof.verdict.proven
    says = "of 200 correct answers 24 are lost, and 4 others are won: 10.0% fewer (10.0% to 10.0%)"
    assert says in proof.verdict.why
    near = [replace(context, lost=3 * (at % 2)) for at, context in enumerate(surer)]
    near = [replace(context, won=0, lost=5 * (at % 4 == 0) + 2) for at, context in enumerate(near)]
    why = Contexts(near).prove().verdict.why
    assert why == (
        "6.5% fewer correct answers by counting them after 16 contexts, the limit is 5.0% "
        "(--max-lost)"
    )


def test_answers_won_offset_answers_lost():
    proof = Contexts(answers(steady(0.0, 0.02), 200)).prove()
    assert proof.verdict.proven and proof.verdict.lost == pytest.approx(0, abs=1e-9)


def test_one_window_has_no_bound():
    proof = Contexts(answers(steady(0.01, 0.01), 200), windows([0.001])).prove()
    assert not proof.verdict.proven and proof.verdict.perplexity_high is None
    assert proof.verdict.why == "one window has no confidence interval, take a longer text"
    assert "no bound" in proof.verdict.losses


def test_contexts_of_which_one_has_all_correct_answers_prove_nothing():
    one, *others = answers([0.0] * 16, 0)
    verdict = Contexts([replace(one, clear=2000.0, dense_right=2000), *others]).prove().verdict
    assert not verdict.proven and verdict.lost == 0 and verdict.lost_high is None
    assert verdict.contexts == 16 and verdict.why == (
        "16 contexts have no confidence interval: one has all answers that dense attention gets"
    )


def test_text_that_ends_is_judged_by_its_windows():
    contexts = Contexts([], windows(steady(0.001, 0.0005, 3)))
    proof = contexts.prove()
    assert proof.verdict.proven and proof.verdict.windows == 3 and proof.verdict.lost is None


@pytest.mark.parametrize("kind", KINDS)
def test_kind_without_contexts_is_not_proven(kind):
    """A text that has ended is not the same as no task of this kind."""
    contexts = Contexts(answers(steady(0.01, 0.01), 200), windows(steady(0.005, 0.001)))
    contexts.left[kind].clear()
    proof = contexts.prove()
    assert not proof.verdict.proven and not proof.unjudged and proof.fault is None
    assert proof.verdict.why.endswith(" was measured: take a longer text")
    assert (kind, 4, 0) in contexts.taken and len(contexts.taken) == 1 + KINDS.index(kind)


def test_proof_without_contexts_is_not_proven():
    assert not prove(lambda kind, count: (), LIMITS, kinds=KINDS, error=ERROR).verdict.proven
    assert not prove(lambda kind, count: (), LIMITS, kinds=(), error=ERROR).verdict.proven


def test_measured_limits_fail_by_the_measured_loss():
    contexts = Contexts(answers(steady(0.01, 0.01), 200))
    proof = contexts.prove(Limits(max_kl=0.005))
    assert proof.fault == (
        "facts: KL to dense attention is 0.01 nats a token, the limit is 0.005 (--max-kl)"
    )


def simulated(draw: Callable[[], np.ndarray], correct: int, trials: int) -> float:
    """Fraction of trials that are proven."""
    proven = 0
    for _ in range(trials):
        proven += (
            Contexts(answers(draw() / correct, correct)).prove(error=0.8 * ERROR).verdict.proven
        )
    return proven / trials


@pytest.mark.parametrize(
    ("answers_of_a_look", "correlation"), [(72, 0.0), (150, 0.05), (600, 0.05)]
)
def test_loss_at_its_limit_is_rarely_proven(answers_of_a_look, correlation):
    """The error of all looks together is at most 5% (benchmarks/gate_errors.py: 20,000 trials)."""
    rng = np.random.default_rng(answers_of_a_look)
    correct = answers_of_a_look // 4

    def draw() -> np.ndarray:
        rates = np.full(16, 0.05)
        if correlation:
            size = 1 / correlation - 1
            rates = rng.beta(0.05 * size, 0.95 * size, 16)
        return rng.binomial(correct, rates)

    assert simulated(draw, correct, 500) < 0.08


def test_small_loss_is_mostly_proven():
    rng = np.random.default_rng(1)
    rates = 0.02 * 49, 0.98 * 49
    assert simulated(lambda: rng.binomial(75, rng.beta(*rates, 16)), 75, 300) > 0.75


def test_model_that_answers_nothing_is_unjudged():
    nothing = [
        replace(context, dense_right=0, clear=0.4, fall=0.0) for context in answers([0.0] * 16)
    ]
    contexts = Contexts(nothing, windows(steady(0.005, 0.001)))
    proof = contexts.prove()
    assert proof.unjudged and not proof.verdict.proven and proof.fault is None
    assert contexts.taken == [("text", 4, 4), ("answer", 4, 4)]
    assert proof.verdict.why.startswith("dense attention answers none of 400 questions correctly")
    # A text that is not proven is another matter.
    assert not Contexts(nothing, windows(steady(0.14, 0.01))).prove().unjudged
    near = Contexts(nothing, windows(steady(0.029, 0.01))).prove()
    assert not near.unjudged and "--max-perplexity" in near.verdict.why


def test_model_that_answers_nothing_is_unjudged_at_any_limit():
    nothing = [
        replace(context, dense_right=0, clear=0.4, fall=0.0) for context in answers([0.0] * 16)
    ]
    proof = Contexts(nothing).prove(Limits(max_lost=1.0))
    assert proof.unjudged and not proof.verdict.proven
    assert proof.verdict.why.startswith("dense attention answers none of 400 questions correctly")


def test_bound_does_not_fall_with_a_larger_limit():
    alike = answers([0.0] * 4, 18)
    highs = [bound("answer", alike, Limits(max_lost=limit), 0.005).high for limit in LARGE]
    assert highs == sorted(highs) and highs[-1] == highs[1] > 0.18
