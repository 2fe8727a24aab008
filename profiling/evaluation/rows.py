"""Rows of an evaluation: one value of one measure, for one method on one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from profiling.quality.trials import FORCED

SCORE = "score"
ACCURACY = "token accuracy"
NLL = "nll of the answer"
PERPLEXITY = "perplexity"
DECODED = f"perplexity, last {FORCED} tokens"
KL = "KL to dense"


@dataclass(frozen=True)
class Measure:
    """Measure of a trial.

    Attributes:
        field: of a trial's record.
        kind: a score from 0 to 1, of which more is better; a loss in nats; a perplexity, whose rows
            are losses; or a divergence from dense attention.
    """

    field: str
    kind: Literal["score", "loss", "perplexity", "divergence"]


MEASURES = {
    SCORE: Measure("score", "score"),
    ACCURACY: Measure("token_accuracy", "score"),
    NLL: Measure("nll", "loss"),
    PERPLEXITY: Measure("blocks", "perplexity"),
    DECODED: Measure("forced", "perplexity"),
    KL: Measure("kl", "divergence"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value of one measure, for one method on one prompt.

    Attributes:
        length: of the prompt, in tokens.
        measure: a name of MEASURES.
        value: in the measure's units; of a perplexity the mean loss of a token in nats.
        prompt: identifies the prompt among those of its task and length.
        unit: what statistics count: prompts of one context share it, and so does the same prompt at
            several depths. It is the same for every method.
        seed: number of the prompt's seed, from 0.
        questions: answers that the value is of.
        depth: the place in the grid, None without one.
        blocks: of a perplexity, the mean loss of each block of tokens.
        block_tokens: tokens of each block.
    """

    task: str
    length: int
    method: str
    measure: str
    value: float
    prompt: str
    unit: str
    seed: int = 0
    questions: int = 1
    depth: float | None = None
    blocks: tuple[float, ...] = ()
    block_tokens: tuple[int, ...] = ()


def rows_of(record: Mapping[str, Any], **place: Any) -> Iterator[Row]:
    """Yield a row of each measure that a trial's record has.

    Args:
        record: as profiling.quality.trials makes it.
        place: all other fields of the rows.
    """
    for name, measure in MEASURES.items():
        value = record.get(measure.field)
        if value is None:
            continue
        if name != PERPLEXITY:
            yield Row(measure=name, value=float(value), **place)
            continue
        tokens = tuple(record["block_tokens"])
        yield Row(
            measure=name,
            value=float(np.average(value, weights=tokens)),
            blocks=tuple(value),
            block_tokens=tokens,
            **place,
        )
