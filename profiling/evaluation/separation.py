"""What a method loses on a task against dense attention, context by context, and which tasks tell patterns apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiling.evaluation.intervals import holm, student, student_p
from profiling.prompts.prompt import Prompt
from profiling.quality.answers import negative_log_likelihood
from profiling.quality.forced import asks, forced_answers
from profiling.quality.trials import copies_of

DENSE = "dense"
# A loss that is no matter of rounding, in nats a token; and of it what oracle top-k may lose as well.
CLEAR, SHARE = 0.05, 0.25


@dataclass(frozen=True)
class Unit:
    """One context with all that is asked over it, or one window of a text: means, -log p of a token in nats.

    right: the share of the answers of which all tokens were the likeliest; None for a text. answers: how many.
    copies: of a text, -log p of its tokens that copy something far back, where it has some.
    """

    nll: float
    right: float | None = None
    copies: float | None = None
    answers: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method on a task, by one measure: `right` is a share, the others nats a token.

    count: contexts. answers: in all of them. difference, low, high: to dense attention, a mean over the same contexts
    with its 95% interval (Student's t). p: of no difference, after Holm's correction over all rows of the table.
    """

    task: str
    method: str
    measure: str
    count: int
    answers: int
    value: float
    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0
    p: float = 1.0

    @property
    def apart(self) -> bool:
        """Whether the method differs from dense attention by more than chance."""
        return self.p < 0.05


def records_of(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[dict[str, float | None]]:
    """The units of prompts that share a context, as plain data, under whatever is applied to the model."""
    if prompts[0].scored or asks(prompts[0]):
        found = [one for answers in forced_answers(model, tokenizer, prompts) for one in answers]
        nll, right = (
            sum(values) / len(found) for values in ([one.mean for one in found], [one.right for one in found])
        )
        return [{"nll": nll, "right": right, "answers": len(found)}]
    records: list[dict[str, float | None]] = []
    for prompt in prompts:
        losses = negative_log_likelihood(model, prompt)
        records.append({"nll": float(losses.mean()), "copies": copies_of(losses, prompt)})
    return records


def rows_of(units: Mapping[str, Mapping[str, Sequence[Unit]]]) -> list[Row]:
    """The table of units by task and method: all methods by all measures that a task has."""
    found = [row for task, by_method in units.items() for row in _rows(task, by_method)]
    tested = [at for at, row in enumerate(found) if row.method != DENSE]
    for at, p in zip(tested, holm([found[at].p for at in tested]), strict=True):
        found[at] = replace(found[at], p=p)
    return found


def _rows(task: str, units: Mapping[str, Sequence[Unit]]) -> list[Row]:
    """p: not corrected yet."""
    found = []
    for measure in ("right", "nll", "copies"):
        values = {method: _values(some, measure) for method, some in units.items()}
        base = values[DENSE]
        for method, own in values.items() if base else ():
            answers = sum(unit.answers for unit in units[method])
            mean = sum(own) / len(own)
            row = Row(task=task, method=method, measure=measure, count=len(own), answers=answers, value=mean)
            if method != DENSE:
                gaps = [one - other for one, other in zip(own, base, strict=True)]
                row = replace(row, difference=sum(gaps) / len(gaps))
                if len(gaps) > 1:
                    gap = student(gaps)
                    row = replace(row, low=gap.low, high=gap.high, p=student_p(gaps))
            found.append(row)
    return found


def earns(rows: Sequence[Row], task: str, pattern: str, oracle: str) -> bool:
    """Whether a pattern is clearly worse than dense on a task by a likelihood, and oracle top-k is not.

    Clearly: by 0.05 nats a token and by more than chance. Not: by at most a quarter of what the pattern loses.
    """
    own = {(row.method, row.measure): row for row in rows if row.task == task}
    for measure in ("nll", "copies"):
        worse, best = own.get((pattern, measure)), own.get((oracle, measure))
        if worse and best and worse.apart and worse.difference >= max(CLEAR, best.difference / SHARE):
            return True
    return False


def text_table(rows: Sequence[Row], densities: Mapping[str, float | None]) -> str:
    """The rows as text, a block for each task."""
    blocks = []
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        lines = [f"{task} ({own[0].count} contexts, {own[0].answers} answers)"]
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
