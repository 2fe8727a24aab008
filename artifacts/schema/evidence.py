"""The evidence section: measurements, and the prompts for selection and for reporting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import Field, model_validator

from artifacts.schema.fields import (
    AtLeast0,
    Count,
    Items,
    Natural,
    Positive,
    Record,
    Sha256,
    Share,
    Text,
    together,
)

MAX_TASKS = 512
# Fields with an interval, and its ends.
_INTERVALS = {
    "nll_rise": ("nll_rise_low", "nll_rise_high"),
    "fewer": ("fewer_low", "fewer_high"),
    "loss": ("loss_low", "loss_high"),
    "perplexity_ratio": ("perplexity_low", "perplexity_high"),
}


class PromptSet(Record):
    """A set of prompts."""

    name: Text = Field(description="what it is called")
    prompts: Count = Field(description="how many prompts it has")
    sha256: Sha256 = Field(description="over the prompts' token ids")


class TaskFigures(Record):
    """Loss of one task's held-out prompts against dense attention."""

    task: Text = Field(description="the task's name")
    length: Count | None = Field(
        default=None, description="of the prompts, in tokens; null: of several lengths"
    )
    prompts: Count = Field(description="how many prompts")
    kl: AtLeast0 = Field(
        description="mean divergence of the next token's distribution from dense, nats a token"
    )
    nll_rise: float | None = Field(
        default=None,
        description="rise of the answer's negative log-likelihood over dense, mean in nats a token",
    )
    nll_rise_low: float | None = Field(
        default=None, description="lower end of its 95% interval over the prompts"
    )
    nll_rise_high: float | None = Field(default=None, description="upper end")
    answers: Count | None = Field(
        default=None, description="answers that the prompts ask for; null: one each, or none"
    )
    dense_right: Natural | None = Field(
        default=None, description="answers that dense attention gets right"
    )
    lost: Natural | None = Field(
        default=None, description="of these, wrong with the artifact applied"
    )
    won: Natural | None = Field(
        default=None, description="of the others, right with the artifact applied"
    )
    fewer_low: float | None = Field(
        default=None,
        description="lower end of the 95% interval over contexts of (lost - won) / dense_right",
    )
    fewer_high: float | None = Field(default=None, description="upper end")
    loss: float | None = Field(
        default=None,
        description=(
            "fraction of dense attention's correct answers that is lost, near ties counted in part"
        ),
    )
    loss_low: float | None = Field(
        default=None, description="lower end of its 95% interval over the contexts"
    )
    loss_high: float | None = Field(default=None, description="upper end")
    perplexity_ratio: Positive | None = Field(
        default=None, description="perplexity over that of dense attention"
    )
    perplexity_low: Positive | None = Field(
        default=None, description="lower end of its 95% interval over the windows of text"
    )
    perplexity_high: Positive | None = Field(default=None, description="upper end")

    @property
    def num_answers(self) -> int:
        """Answers that are counted: `answers`, or one for each prompt."""
        if self.answers is None:
            return self.prompts
        return self.answers

    @property
    def net_lost(self) -> int:
        """Right answers lost, less those won."""
        return (self.lost or 0) - (self.won or 0)

    @property
    def fewer(self) -> float:
        """`net_lost`, relative to the answers that dense attention gets right."""
        return self.net_lost / max(1, self.dense_right or 0)

    @property
    def dense_accuracy(self) -> float:
        """Accuracy of dense attention over all answers."""
        return (self.dense_right or 0) / self.num_answers

    @property
    def accuracy(self) -> float:
        """Accuracy with the artifact applied."""
        return ((self.dense_right or 0) - self.net_lost) / self.num_answers

    @model_validator(mode="after")
    def _fits(self) -> Self:
        answers = self.num_answers
        if self.lost is not None and self.lost > (self.dense_right or 0):
            right = self.dense_right or 0
            raise ValueError(f"lost is {self.lost}, but dense attention answers {right} right")
        if self.dense_right is not None and self.dense_right > answers:
            raise ValueError(f"dense_right is {self.dense_right}, there are {answers} answers")
        if self.won is not None and self.won > answers - (self.dense_right or 0):
            wrong = answers - (self.dense_right or 0)
            raise ValueError(f"won is {self.won}, dense attention answers {wrong} wrong")
        for name, ends in _INTERVALS.items():
            together(self, *ends)
            value = getattr(self, name)
            low, high = (getattr(self, end) for end in ends)
            if low is not None and (value is None or not low <= value <= high):
                raise ValueError(
                    f"{name} must lie from {ends[0]} to {ends[1]}, got {value} for {low} to {high}"
                )
        return self


class Measurement(Record):
    """One measured number against its baseline, with the command that measures it again."""

    name: Text = Field(description="what was measured")
    value: float = Field(description="with the artifact applied")
    unit: str = Field(description="of `value` and `baseline`")
    baseline: float | None = Field(
        default=None, description="without the artifact, in the same unit"
    )
    baseline_name: Text | None = Field(
        default=None, description="what the baseline was; null where there is none"
    )
    length: Count | None = Field(default=None, description="of the prompts, in tokens")
    samples: Count | None = Field(default=None, description="measurements behind the value")
    command: Text = Field(description="measures it again")
    device: Text = Field(description="on which machine")
    versions: dict[str, str] = Field(description="of packages that the number depends on")

    @model_validator(mode="after")
    def _both(self) -> Self:
        together(self, "baseline", "baseline_name")
        return self


class Verdict(Record):
    """Result of the gate: upper bounds of the losses at 95% confidence, and their limits."""

    proven: bool = Field(description="true: each bound is at most its limit")
    why: Text | None = Field(default=None, description="why not, where it is not; else null")
    contexts: Natural = Field(default=0, description="contexts with answers behind `lost`")
    lost: float | None = Field(
        default=None,
        description=(
            "measured fraction of dense attention's correct answers that is lost, near ties "
            "counted in part; null: no answers were asked for"
        ),
    )
    lost_high: float | None = Field(
        default=None, description="its upper bound; null: one context has none"
    )
    max_lost: Share | None = Field(default=None, description="its limit; null: none")
    windows: Natural = Field(default=0, description="windows of text behind `perplexity`")
    perplexity: float | None = Field(
        default=None, description="measured relative rise of the perplexity; null: no text"
    )
    perplexity_high: float | None = Field(
        default=None, description="its upper bound; null: one window has none"
    )
    max_perplexity: Positive | None = Field(default=None, description="its limit; null: none")

    @property
    def losses(self) -> str:
        """Describe the bounds: the answers first, then the text."""
        parts = []
        if self.lost is not None:
            parts.append(_bounded(self.lost, self.lost_high, "fewer correct answers"))
        if self.perplexity is not None:
            parts.append(_bounded(self.perplexity, self.perplexity_high, "more perplexity"))
        return "; ".join(parts) or "no loss was measured"


def _bounded(value: float, high: float | None, of: str) -> str:
    """Describe a measured loss with its upper bound."""
    if high is None:
        return f"{percent(value)} {of} measured, no bound"
    return f"at most {percent(high)} {of} (95% confidence; measured {percent(value)})"


def percent(value: float) -> str:
    """Describe a fraction in percent with one decimal, without a negative zero."""
    return f"{round(100 * value, 1) + 0:.1f}%"


class Evidence(Record):
    """Measurements: figures of each task on held-out prompts, and numbers against a baseline."""

    verdict: Verdict | None = Field(
        default=None, description="of the gate that passed; null: none has run"
    )
    chosen_on: PromptSet | None = Field(
        default=None,
        description=(
            "prompts on which the served setting was chosen; null: the calibration's alone"
        ),
    )
    reported_on: PromptSet | None = Field(
        default=None,
        description=(
            "the prompts of `tasks`; no choice was made by them where they are not `chosen_on`"
        ),
    )
    tasks: Annotated[Items[TaskFigures], Field(max_length=MAX_TASKS)] = Field(
        default=(), description="for each task what its prompts lose against dense attention"
    )
    measurements: Items[Measurement] = Field(default=(), description="numbers against a baseline")

    @property
    def measured_length(self) -> int | None:
        """Length in tokens of the longest prompt in the losses of `tasks`; None without tasks."""
        return max((task.length for task in self.tasks if task.length is not None), default=None)

    @property
    def proof(self) -> str:
        """Describe the result of the gate, and up to which prompt length it holds."""
        if self.verdict is None:
            return "not proven: no gate has run on its patterns"
        tokens = self.measured_length
        up_to = ""
        if tokens is not None:
            up_to = f" up to {tokens:,} tokens"
        if self.verdict.proven:
            return f"proven{up_to}: {self.verdict.losses}"
        return f"not proven{up_to}: {self.verdict.why or 'no reason given'}; {self.verdict.losses}"

    def beyond(self, tokens: int) -> str | None:
        """Return a warning for a prompt longer than the longest measured one, else None."""
        measured = self.measured_length
        if measured is None or tokens <= measured:
            return None
        return (
            f"a prompt of {tokens:,} tokens is longer than the {measured:,} up to which the "
            "artifact's losses were measured: its loss there is unknown (headwise gate "
            "--length measures it)"
        )

    def with_measurements(
        self, entries: Iterable[Measurement], *, command: str | None = None
    ) -> Evidence:
        """Return the evidence with added measurements; those of `command`, if set, are replaced."""
        remaining = [
            entry for entry in self.measurements if command is None or entry.command != command
        ]
        return self.model_copy(update={"measurements": (*remaining, *entries)})

    def __bool__(self) -> bool:
        return bool(self.tasks or self.measurements)
