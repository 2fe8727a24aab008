"""Simulate the gate: how often it proves a loss that is at its limit, and one that is small.

    python benchmarks/gate_errors.py --out docs/results/gate_errors.json

Each trial draws held-out contexts in which dense attention gets a number of answers right. Each
context loses answers at a rate of its own, from a beta distribution with the mean loss and a given
correlation of the answers of one context. The gate's own `prove` judges them, with the limit of 5%.

`error`: a search of which every budget loses as much as the limit allows: the trials in which one
of its budgets is proven. `proven`, `contexts`: of a first budget that loses less.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from result import Result, commit, labeled, write

from artifacts.files import check_writable
from profiling.evaluation.intervals import wilson
from search.model.limits import MAX_LOST, Limits
from search.model.losses import ContextLoss
from search.model.proof import ERROR, LOOKS, ROUNDS, Kind, Proof, prove

ANSWERS = (72, 150, 300, 600)
CORRELATIONS = (0.0, 0.02, 0.05, 0.1)
SMALL = (0.01, 0.02)
LIMITS = Limits()


def simulated(
    rng: np.random.Generator, loss: float, correlation: float, answers: int, error: float
) -> Proof:
    """The proof of contexts that lose answers at random.

    Args:
        rng: of the draws.
        loss: mean fraction of correct answers that is lost.
        correlation: of the answers of one context.
        answers: that dense attention gets right in four contexts.
        error: that the proof may spend.
    """
    correct = answers // 4
    rates = np.full(LOOKS[-1], loss)
    if correlation:
        size = 1 / correlation - 1
        rates = rng.beta(loss * size, (1 - loss) * size, LOOKS[-1])
    contexts = [
        ContextLoss(
            task="facts",
            digest=str(at),
            kl=0.0,
            answers=correct,
            tokens=float(correct),
            dense_right=correct,
            lost=int(lost),
            clear=float(correct),
            fall=float(lost),
        )
        for at, lost in enumerate(rng.binomial(correct, rates))
    ]

    def measure(kind: Kind, count: int) -> Sequence[ContextLoss]:
        taken = contexts[:count]
        del contexts[:count]
        return taken

    return prove(measure, LIMITS, kinds=("answer",), error=error)


def search_errs(rng: np.random.Generator, loss: float, correlation: float, answers: int) -> bool:
    """True if a search proves one of its budgets, of which each loses as much."""
    return any(
        simulated(rng, loss, correlation, answers, ERROR * spending).verdict.proven
        for spending in ROUNDS
    )


def rows(trials: int) -> list[dict[str, Any]]:
    """A row for each number of answers and each correlation."""
    found = []
    for answers in ANSWERS:
        for correlation in CORRELATIONS:
            rng = np.random.default_rng([answers, round(1000 * correlation)])
            errors = sum(search_errs(rng, MAX_LOST, correlation, answers) for _ in range(trials))
            interval = wilson(errors, trials)
            row: dict[str, Any] = {
                "answers_of_4_contexts": answers,
                "correlation": correlation,
                "error": round(interval.value, 4),
                "error_low": round(interval.low, 4),
                "error_high": round(interval.high, 4),
            }
            for loss in SMALL:
                proofs = [
                    simulated(rng, loss, correlation, answers, ERROR * ROUNDS[0])
                    for _ in range(trials // 4)
                ]
                row[f"proven_at_{loss}"] = round(
                    sum(each.verdict.proven for each in proofs) / len(proofs), 3
                )
                row[f"contexts_at_{loss}"] = round(
                    sum(each.verdict.contexts for each in proofs) / len(proofs), 1
                )
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def main() -> None:
    """Simulate, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=4000)
    options = parser.parse_args()
    check_writable(options.out)
    settings = {"limit": MAX_LOST, "trials": options.trials}
    result = Result(
        what="Error of the gate in simulated searches, and how often it proves a small loss",
        command=f"python benchmarks/gate_errors.py --out FILE --trials {options.trials}",
        commit=commit(),
        machine="any: random numbers alone",
        versions={"headwise": version("headwise"), "numpy": np.__version__},
        rows=labeled("settings", [settings]) + labeled("row", rows(options.trials)),
    )
    write(options.out, result)


if __name__ == "__main__":
    main()
