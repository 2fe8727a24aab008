"""What a method loses on a task against dense attention, answer by answer, and which tasks tell patterns apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiling.evaluation.intervals import differs, paired_difference
from profiling.prompts.prompt import Prompt
from profiling.quality.answers import negative_log_likelihood
from profiling.quality.forced import asks, forced_answers
from profiling.quality.trials import copies_of

DENSE = "dense"
# A loss that is no matter of rounding, in nats a token; and of it what oracle top-k may lose as well.
CLEAR, SHARE = 0.05, 0.25


@dataclass(frozen=True)
class Unit:
    """One answer, or one window of a text: -log p of a token on average, in nats.

    right: 1 where all tokens of the answer were the likeliest, 0 where not; None for a text.
    copies: of a text, -log p of its tokens that copy something far back, where it has some.
    """

    nll: float
    right: float | None = None
    copies: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method on a task, by one measure: `right` is a share, the others nats a token.

    difference, low, high: to dense attention, over the same `count` answers or windows, with its 95% interval.
    apart: whether 0 is outside it.
    """

    task: str
    method: str
    measure: str
    count: int
    value: float
    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0
    apart: bool = False


def records_of(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[dict[str, float | None]]:
    """The units of prompts that share a context, as plain data, under whatever is applied to the model."""
    if prompts[0].scored or asks(prompts[0]):
        found = forced_answers(model, tokenizer, prompts)
        return [{"nll": one.mean, "right": float(one.right)} for answers in found for one in answers]
    records: list[dict[str, float | None]] = []
    for prompt in prompts:
        losses = negative_log_likelihood(model, prompt)
        records.append({"nll": float(losses.mean()), "copies": copies_of(losses, prompt)})
    return records


def rows_of(task: str, units: Mapping[str, Sequence[Unit]]) -> list[Row]:
    """All methods by all measures that the task has."""
    found = []
    for measure in ("right", "nll", "copies"):
        values = {method: _values(some, measure) for method, some in units.items()}
        base = values[DENSE]
        for method, own in values.items() if base else ():
            row = Row(task=task, method=method, measure=measure, count=len(own), value=sum(own) / len(own))
            if method != DENSE:
                gap = paired_difference(own, base)
                row = replace(row, difference=gap.value, low=gap.low, high=gap.high, apart=differs(own, base))
            found.append(row)
    return found


def earns(units: Mapping[str, Sequence[Unit]], pattern: str, oracle: str | None) -> bool:
    """Whether a pattern is clearly worse than dense by a likelihood, and oracle top-k is not.

    Clearly: by 0.05 nats a token and beyond its interval. Not: by at most a quarter of what the pattern loses. Without
    an oracle only the first is asked.
    """
    for measure in ("nll", "copies"):
        base, own = (_values(units[method], measure) for method in (DENSE, pattern))
        if not base or not differs(own, base) or (loss := _loss(own, base)) < CLEAR:
            continue
        if oracle is None or _loss(_values(units[oracle], measure), base) <= SHARE * loss:
            return True
    return False


def text_table(rows: Sequence[Row], densities: Mapping[str, float | None]) -> str:
    """The rows as text, a block for each task."""
    blocks = []
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        lines = [f"{task} ({own[0].count})"]
        for method in dict.fromkeys(row.method for row in own):
            cells = [_cell(row) for row in own if row.method == method]
            density = densities.get(method)
            lines.append(f"  {method:<16}{'' if density is None else f'{density:.3f}':>6}  {'   '.join(cells)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(row: Row) -> str:
    gap = "" if row.method == DENSE else f" ({row.difference:+.3f}, {row.low:+.3f} to {row.high:+.3f})"
    return f"{row.measure} {row.value:.3f}{gap}{'*' if row.apart else ''}"


def _values(units: Sequence[Unit], measure: str) -> list[float]:
    """A measure of all units that have it; the same ones for every method."""
    found = [getattr(unit, measure) for unit in units]
    return [value for value in found if value is not None]


def _loss(own: Sequence[float], base: Sequence[float]) -> float:
    return sum(own) / len(own) - sum(base) / len(base)
