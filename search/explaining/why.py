"""Why a head got its pattern, in sentences that are true of the numbers in the artifact's sidecar."""

from __future__ import annotations

import numpy as np

from artifacts import pattern_name
from search.common.measures import DRIFT_FLOOR
from search.explaining.findings import Findings, Result, on_hull
from search.model.hulls import at_price, slope

# Float32 in the sidecar: what differs by less is the same number, written down twice.
_SAME = 1e-6


def reasons(found: Findings, layer: int, head: int) -> list[str]:
    """One sentence or a few: by what the winner won, what came next, and what happened to the head afterwards."""
    winner = found.winner(layer, head)
    if winner is None:
        return ["The search chose nothing for this head: its pattern was put there otherwise."]
    results = found.results(layer, head)
    if found.artifact.search and found.artifact.search.allocation == "heads":
        said = _within_budget(found, results, winner)
    else:
        said = _at_price(found, layer, results, winner)
    row = found.artifact.prefill.layers[layer]
    assert row is not None, "checked where the head was asked for"
    served = pattern_name(found.artifact.patterns[row[head]])
    if served != winner.pattern:
        said.append(f"The artifact serves {served} all the same: the pattern was changed after the search.")
    return [*_transferred(found, layer, head), *said]


def _within_budget(found: Findings, results: list[Result], winner: Result) -> list[str]:
    """Each head had the same budget: the least error within it (MInference 1.0, Algorithm 1)."""
    search = found.artifact.search
    assert search is not None
    better = [result for result in results if result.error < winner.error]
    within = [result for result in results if result.density <= search.target_density + _SAME or result is winner]
    budget = f"{search.target_density:.3f} of dense attention"
    if not better:
        said = [
            f"{winner.pattern} has the least error of the {len(results)} candidates.",
            _sizes(results, within, budget),
        ]
    elif not set(better) & set(within):
        said = [
            f"{winner.pattern} has the least error of the {len(within)} candidates within the budget of {budget}.",
            f"{_best(better).pattern} has less ({_best(better).error:.4f}), but computes {_best(better).density:.3f}.",
        ]
    else:
        said = [
            f"{_best(better).pattern} has less error than {winner.pattern} over all prompts, but was not within the "
            f"budget of {budget} on the prompt that the sizes were chosen on."
        ]
    if others := [result for result in within if result.error > winner.error]:
        runner = _best(others)
        said.append(f"Next comes {runner.pattern} with {_times(runner.error, winner.error)} the error.")
    return said


def _sizes(results: list[Result], within: list[Result], budget: str) -> str:
    if len(within) == len(results):
        return f"Each was made as large as the budget of {budget} allows."
    return f"{len(within)} of them keep to the budget of {budget}."


def _at_price(found: Findings, layer: int, results: list[Result], winner: Result) -> list[str]:
    """One budget for the model: the least of loss and cost at the price that all heads share."""
    line = [results[at] for at in on_hull(results)]
    if found.price is None or found.ranks > 1:
        stands = "is" if winner in line else "is not"
        how = f"it was chosen together with others, by what the slowest of {found.ranks} ranks takes in a layer"
        how = how if found.ranks > 1 else "the price that it was chosen at was not written down"
        return [f"{winner.pattern} {stands} on the hull; {how}."]
    price, weight = float(found.price[layer]), float(found.weight[layer])
    per, unit, per_unit = _unit(winner)
    lost = "squared error" if winner.change is None else "change of the residual stream"
    lost = lost if winner.objective is None else "loss"

    best = results[at_price([weight * result.loss for result in results], [result.cost for result in results], price)]
    weighed = "" if weight == 1 else f" (times {weight:.3g} in this layer)"
    at_it = f"the model's price of {price * per:.3g} {lost}{weighed} {per_unit}"
    if best.candidate != winner.candidate:
        if winner.cost > best.cost:
            why = "dearer steps of other heads did not fit any more, and it came in a later step with what was left"
        else:
            why = "the trial that won left the dearer estimates out"
        return [f"At {at_it}, this head would have {best.pattern}; it has {winner.pattern}, for {why}."]
    costs, losses = np.array([[result.cost, weight * result.loss] for result in line]).T / [[per], [1.0]]

    def steepness(step: int) -> float:
        return slope(costs, losses, step, step + 1)

    said = [f"At {at_it}, {winner.pattern} has the least sum of {lost} and cost among {len(results)} candidates."]
    if winner not in line:
        return said
    at = line.index(winner)
    if at > 0:
        cheaper = line[at - 1]
        said.append(
            f"The next cheaper, {cheaper.pattern}, would save {(winner.cost - cheaper.cost) / per:.3g} {unit} and add "
            f"{lost} at {steepness(at - 1):.3g} {per_unit}, more than the price."
        )
    if at + 1 < len(line):
        dearer = line[at + 1]
        said.append(
            f"The next dearer, {dearer.pattern}, would cost {(dearer.cost - winner.cost) / per:.3g} {unit} more and "
            f"take away {lost} at {steepness(at):.3g} {per_unit}, less than the price."
        )
    return said


def _unit(result: Result) -> tuple[float, str, str]:
    """In which unit a cost is written: its size, its name, and what a price is for."""
    if result.seconds is not None:
        return 1e-3, "ms", "a ms"
    return (1e9, "GFLOP", "a GFLOP") if result.flops is not None else (1.0, "of dense", "for all of dense")


def _transferred(found: Findings, layer: int, head: int) -> list[str]:
    if found.drift is None or found.before is None or found.again is None:
        return []
    drift, before = float(found.drift[layer, head]), float(found.before[layer, head])
    here = before + drift * max(before, DRIFT_FLOOR)
    moved = f"an error of {before:.4f} there and {here:.4f} here (drift {drift:+.2f})"
    if found.again[layer, head]:
        return [f"Searched again on this model: the pattern found on another one had {moved}."]
    return [f"Taken over from another model: the pattern has {moved}. The candidates' scores are those from there."]


def _best(results: list[Result]) -> Result:
    return min(results, key=lambda result: result.error)


def _times(more: float, less: float) -> str:
    return f"{more / less:.2f} times" if less > 0 else f"{more:.4f} against none of"
