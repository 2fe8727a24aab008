"""Several artifacts of one model on the same prompts: attention's seconds in turn, and how far they are from dense.

`profiling.versus` compares files; a report compares single kinds that are given as much time as the artifact takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from artifacts import HeadwiseError
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt, parse_task
from profiling.quality.intervals import holm, paired_difference, sign_flip
from profiling.quality.logits import DenseLogits, Drift
from profiling.speed.attention_time import attention_seconds, build_of
from runtime import Headwise
from runtime.plans import layer_plans


@dataclass(frozen=True, kw_only=True)
class Row:
    """One artifact. Each error is a standard error over prompts.

    seconds: attention of one prefill, index builds included, and index_seconds those alone; None where not timed.
    kl: nats a token.
    loss: what is added to the negative log-likelihood of a token, in nats: about the relative rise of perplexity.
    apart, low, high: its KL less that of the first artifact, over pairs of prompts, with its 95% interval; None for the
        first itself. p: of that, by a randomisation test of the pairs; corrected: by Holm's correction for all rows.
    """

    name: str
    density: float
    seconds: float | None
    kl: float
    kl_error: float | None
    kl_by_task: dict[str, float]
    loss: float
    loss_error: float | None
    apart: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    corrected: float | None = None
    index_seconds: float | None = None


def timed(
    loaded: LoadedModel, some: Mapping[str, Headwise], prompt: Prompt, *, repeats: int, builds: bool = False
) -> dict[str, float]:
    """Attention's seconds of each by its name, and of both dense attentions; nothing without repeats.

    builds: also those of index builds alone, as attention_seconds names them.

    Raises:
        HeadwiseError: they have patterns for different layers.
    """
    if not repeats:
        return {}
    plans = {name: layer_plans(each.artifact, each.arrays) for name, each in some.items()}
    if len({tuple(by_layer) for by_layer in plans.values()}) > 1:
        raise HeadwiseError("the artifacts have patterns for different layers: their times do not compare")
    return attention_seconds(loaded, prompt, plans, repeats=repeats, dense=True, builds=builds)


def compared(
    loaded: LoadedModel,
    some: Mapping[str, Headwise],
    prompts: Mapping[str, Sequence[Prompt]],
    seconds: Mapping[str, float],
    densities: Mapping[str, float],
    *,
    places: int | None = None,
) -> list[Row]:
    """What each makes of the same prompts by task, as many of each; `seconds` as `timed` has them."""
    flat = [prompt for made in prompts.values() for prompt in made]
    logits = DenseLogits(loaded.model, flat, places=places)
    rows: list[Row] = []
    first: list[float] | None = None
    for name, each in some.items():
        with each.apply(loaded.model, check_weights=False, strict=True):
            drift = logits.drift()
        kl = [float(part.mean()) for part in np.split(drift.kl, len(flat))]
        row = _row(name, densities[name], seconds.get(name), drift, kl, list(prompts), first)
        rows.append(replace(row, index_seconds=seconds.get(build_of(name))))
        first = first or kl
    corrected = iter(holm([row.p for row in rows if row.p is not None]))
    return [row if row.p is None else replace(row, corrected=next(corrected)) for row in rows]


def _row(
    name: str,
    density: float,
    seconds: float | None,
    drift: Drift,
    kl: list[float],
    tasks: Sequence[str],
    first: list[float] | None,
) -> Row:
    # A prompt is one sample: its tokens are no independent ones.
    loss = [float(np.nanmean(part)) for part in np.split(drift.loss - drift.dense_loss, len(kl))]
    by_task = np.split(drift.kl, len(tasks))
    apart = None if first is None else paired_difference(kl, first)
    return Row(
        name=name,
        density=density,
        seconds=seconds,
        kl=drift.mean_kl,
        kl_error=_standard_error(kl),
        kl_by_task={parse_task(task).name: float(part.mean()) for task, part in zip(tasks, by_task, strict=True)},
        loss=float(np.mean(loss)),
        loss_error=_standard_error(loss),
        apart=None if apart is None else apart.value,
        low=None if apart is None else apart.low,
        high=None if apart is None else apart.high,
        p=None if first is None else sign_flip([own - other for own, other in zip(kl, first, strict=True)]),
    )


def _standard_error(means: Sequence[float]) -> float | None:
    """Of the mean over prompts; none of one alone."""
    return float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else None
