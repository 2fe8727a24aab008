"""Limits on what patterns may lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from artifacts.cli.options import POSITIVE, SHARE, Arg, CommandConfig

if TYPE_CHECKING:
    from artifacts import TaskFigures

MAX_LOST = 0.05
MAX_PERPLEXITY = 0.03
_GROUP = "limits on held-out prompts"


class Limits(CommandConfig):
    """Limits on losses. The first two are proven: the upper bound is within them.

    Attributes:
        max_lost: fraction of dense attention's correct answers that is lost, less those won.
        max_perplexity: relative rise over dense attention's perplexity, of text.
        max_kl: measured mean nats a token to dense attention, of each task; None: no limit.
        max_nll: measured rise of -log p of the right answer, nats for each of its tokens, of each
            task; None: no limit.
    """

    max_lost: Annotated[
        float,
        Arg("correct answers that may be lost, at 95% confidence", group=_GROUP),
        SHARE,
    ] = MAX_LOST
    max_perplexity: Annotated[
        float,
        Arg("rise of a text's perplexity, at 95% confidence", group=_GROUP),
        POSITIVE,
    ] = MAX_PERPLEXITY
    max_kl: Annotated[
        float | None,
        Arg("measured nats a token to dense attention (default: no limit)", group=_GROUP),
        POSITIVE,
    ] = None
    max_nll: Annotated[
        float | None,
        Arg(
            "measured rise of -log p of right answers, nats a token (default: no limit)",
            group=_GROUP,
        ),
        POSITIVE,
    ] = None

    def exceeded(self, tasks: Sequence[TaskFigures]) -> str | None:
        """The worst loss beyond a limit, in words; None where there is none.

        A limit that has to be proven is exceeded where the whole 95% interval is above it.

        Args:
            tasks: figures of each task, and of all answers together.
        """
        faults = [
            (times, f"{task.task}: {text}") for task in tasks for times, text in self._faults(task)
        ]
        if not faults:
            return None
        return max(faults)[1]

    def _faults(self, task: TaskFigures) -> Iterator[tuple[float, str]]:
        """(multiple of its limit, in words) of a task's losses beyond a limit."""
        if task.loss_low is not None and task.loss_low > self.max_lost:
            yield (
                task.loss_low / self.max_lost,
                f"{task.loss:.1%} fewer correct answers ({task.loss_low:.1%} to "
                f"{task.loss_high:.1%}), the limit is {self.max_lost:.1%} (--max-lost)",
            )
        if task.fewer_low is not None and task.fewer_low > self.max_lost and task.net_lost > 1:
            yield (
                task.fewer_low / self.max_lost,
                f"of {task.dense_right} correct answers {task.lost} are lost, and {task.won} "
                f"others are won: {task.fewer:.1%} fewer ({task.fewer_low:.1%} to "
                f"{task.fewer_high:.1%}), the limit is {self.max_lost:.1%} (--max-lost)",
            )
        if task.perplexity_low is not None and task.perplexity_low - 1 > self.max_perplexity:
            assert task.perplexity_ratio is not None and task.perplexity_high is not None
            yield (
                (task.perplexity_low - 1) / self.max_perplexity,
                f"perplexity rises by {task.perplexity_ratio - 1:.2%} "
                f"({task.perplexity_low - 1:.2%} to {task.perplexity_high - 1:.2%}), the limit is "
                f"{self.max_perplexity:.2%} (--max-perplexity)",
            )
        if self.max_kl is not None and task.kl > self.max_kl:
            yield (
                task.kl / self.max_kl,
                f"KL to dense attention is {task.kl:.4g} nats a token, the limit is "
                f"{self.max_kl:g} (--max-kl)",
            )
        rise = task.nll_rise
        if self.max_nll is not None and rise is not None and rise > self.max_nll:
            yield (
                rise / self.max_nll,
                f"-log p of the right answer rises by {rise:.3f} nats a token, the limit is "
                f"{self.max_nll:g} (--max-nll)",
            )
