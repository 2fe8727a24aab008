"""The gate: budgets are tried until the losses of one are proven to be within the limits.

Each budget gets held-out contexts of its own, so what chose a budget never judges it. The
allowed error is divided over the budgets (search.model.proof.ROUNDS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from artifacts import Finding
from profiling.progress import announce
from profiling.quality.sequences import Reference
from search.model.allocation import Allocation, CostCurves
from search.model.limits import Limits
from search.model.losses import ContextLoss
from search.model.prompts import HeldOut, NoMoreText
from search.model.proof import ERROR, ROUNDS, Kind, Proof, prove
from search.model.run import Round, SearchRun
from search.model.speed import prefill_seconds

# Predicted loss to aim at, relative to the limit, so that it can be proven.
AIM = 0.4
# After a budget that was not proven the predicted loss is at most this part of the measured one.
_AT_MOST = 0.5
# A raise is at least by this factor: where nothing is left to spend there is none.
_LEAST_RAISE = 1.01
# Measured losses below this part of their limits ask for a cheaper budget. Its predicted losses are
# at most this factor larger. It has to save this fraction of dense attention's cost and, where that
# is in seconds, this fraction of a whole prefill.
_FAR_BELOW = 0.2
_LARGER = 2.0
_WORTHWHILE = 0.02
_SOONER = 0.01
# Budgets of the frontier's other points, relative to the accepted one.
_FRONT = (0.5, 2.0)


def gate(run: SearchRun, limits: Limits, held_out: HeldOut, *, fixed: bool) -> None:
    """Raise the budget until its losses are proven to be within the limits; add other points.

    The run gets the accepted allocation, its proof, all rounds, and the points of the frontier.

    Args:
        run: the search, with the allocation of its first budget.
        limits: the most that may be lost.
        held_out: held-out prompts.
        fixed: True accepts the first budget whatever it loses.

    Raises:
        Finding: no budget is proven, though there is something to lose.
        HeadwiseError: a loss is not finite.
    """
    first = _try(run, run.allocation, limits, held_out, ERROR * (1 if fixed else ROUNDS[0]))
    accepted = first
    if not fixed and not first.proof.unjudged:
        if first.proof.verdict.proven:
            accepted = _cheaper(run, first, limits, held_out)
        else:
            accepted = _raised(run, first, limits, held_out)
    run.allocation = accepted.allocation
    run.accepted = accepted
    run.points = _front(run, accepted)
    for allocation, losses in run.points:
        run.add_trial(allocation, losses, f"first contexts of {accepted.name}")


def _try(
    run: SearchRun, allocation: Allocation, limits: Limits, held_out: HeldOut, error: float
) -> Round:
    """Test one allocation on new held-out contexts.

    Raises:
        NoMoreText: a task has no context for the first look, so that its loss would go unmeasured.
    """
    name = f"round {len(run.rounds) + 1}"
    references: list[Reference] = []
    begun: set[Kind] = set()

    def measure(kind: Kind, contexts: int) -> Sequence[ContextLoss]:
        prompts = held_out.take(kind, contexts, every=kind not in begun)
        begun.add(kind)
        if not prompts:
            return ()
        reference = run.reference(prompts)
        references.append(reference)
        (losses,) = run.measure(reference, [allocation], name=f"{name}, {kind}s")
        return losses

    proof = prove(measure, limits, kinds=held_out.kinds, error=error)
    result = Round(name=name, allocation=allocation, proof=proof, references=tuple(references))
    run.rounds.append(result)
    run.add_trial(allocation, proof.losses, name)
    return result


def _raised(run: SearchRun, last: Round, limits: Limits, held_out: HeldOut) -> Round:
    """Raise the budget until one is proven.

    Raises:
        Finding: none is.
    """
    heads = run.heads
    for spending in ROUNDS[1:]:
        allocation = cheapest(heads, last.allocation, _factors(last.proof))
        if allocation.cost < last.allocation.cost * _LEAST_RAISE:
            break
        if run.ranks.is_first:
            announce(
                f"{last.name} proves nothing: {last.proof.verdict.why}; budget raised from "
                f"{heads.share(last.allocation.cost):.3f} to {heads.describe(allocation.cost)}"
            )
        try:
            last = _try(run, allocation, limits, held_out, ERROR * spending)
        except NoMoreText as error:
            raise Finding(
                f"not proven: {last.proof.verdict.why}, with "
                f"{heads.describe(last.allocation.cost)} spent, and a larger budget needs other "
                f"held-out prompts: {error}, or --budget, which writes an artifact whatever it "
                "loses"
            ) from error
        if last.proof.verdict.proven or last.proof.unjudged:
            return last
    raise Finding(
        f"not proven: {last.proof.verdict.why}, with {heads.describe(last.allocation.cost)} "
        "spent; take more --samples, allow more loss, or take --budget, which writes an artifact "
        "whatever it loses"
    )


def _factors(proof: Proof) -> dict[Kind, float]:
    """Factors by which the predicted loss of each kind has to fall after a failed proof.

    Losses that are below their limits, but not proven, have to fall by half.
    """
    factors = {}
    for kind, ratio in proof.ratios.items():
        factors[kind] = min(1.0, AIM / max(ratio, 1e-9))
    if min(factors.values()) > _AT_MOST:
        factors = {kind: min(factor, _AT_MOST) for kind, factor in factors.items()}
    return factors


def _cheaper(run: SearchRun, first: Round, limits: Limits, held_out: HeldOut) -> Round:
    """Try one cheaper allocation where all measured losses are far below their limits."""
    verdict = first.proof.verdict
    ratios = first.proof.ratios
    if not ratios or max(ratios.values()) > _FAR_BELOW:
        return first
    factors = {kind: min(AIM / max(ratio, 1e-9), _LARGER) for kind, ratio in ratios.items()}
    heads = run.heads
    allocation = cheapest(heads, first.allocation, factors)
    saved = first.allocation.cost - allocation.cost
    if heads.share(saved) < _WORTHWHILE:
        return first
    if heads.unit == "seconds" and saved < _SOONER * prefill_seconds(run):
        if run.ranks.is_first:
            announce(
                f"{first.name} is proven with much to spare ({verdict.losses}), but a cheaper "
                f"budget would make the first token {saved:.2g} s sooner, less than {_SOONER:.0%}"
            )
        return first
    if run.ranks.is_first:
        announce(
            f"{first.name} is proven with much to spare ({verdict.losses}); a cheaper budget is "
            f"tried: {heads.describe(allocation.cost)}"
        )
    try:
        second = _try(run, allocation, limits, held_out, ERROR)
    except NoMoreText as error:
        why = f"a cheaper budget cannot be tested: {error}"
    else:
        if second.proof.verdict.proven:
            return second
        why = f"{second.name} proves nothing: {second.proof.verdict.why}"
    if run.ranks.is_first:
        announce(f"{why}; {first.name} holds")
    return first


def cheapest(
    heads: CostCurves, allocation: Allocation, factors: Mapping[Kind, float]
) -> Allocation:
    """The cheapest allocation whose predicted loss of each kind is a factor of another's.

    Losses are taken to be proportional to those that the curves predict
    (docs/internals.md has the measurements).

    Args:
        heads: curves and costs.
        allocation: the other one, whose weights and dense tail are kept.
        factors: by kind; other kinds of curves take the strictest.
    """
    strictest = min(factors.values())
    by_kind = {str(kind): factor for kind, factor in factors.items()}
    targets = {
        kind: by_kind.get(kind, strictest) * loss
        for kind, loss in heads.predicted_by_kind(allocation).items()
    }
    return heads.cheapest(targets, allocation.tail, prompt_weights=allocation.prompt_weights)


def _front(run: SearchRun, accepted: Round) -> list[tuple[Allocation, Sequence[ContextLoss]]]:
    """Measure the points on one context of each task, the accepted one first."""
    points = {accepted.allocation.digest: accepted.allocation}
    budget = accepted.allocation.cost
    for factor in _FRONT:
        if run.heads.least(accepted.allocation.tail) < budget * factor:
            other = run.heads.reallocate(accepted.allocation, budget * factor)
            points.setdefault(other.digest, other)
    allocations = list(points.values())
    losses: list[list[ContextLoss]] = [[] for _ in allocations]
    seen: set[str] = set()
    for reference in accepted.references:
        numbers = []
        for number, sequence in enumerate(reference.sequences):
            if sequence.task not in seen:
                numbers.append(number)
                seen.add(sequence.task)
        if numbers:
            measured = run.measure(reference, allocations, numbers, name="points of the front")
            for own, each in zip(losses, measured, strict=True):
                own += each
    return list(zip(allocations, losses, strict=True))
