"""What the choices of a decode section cost by how many tokens they have: so many (top-k), or a share (top-p).

Shapes: G KV heads, n query heads of each, K keys, E value dim, P points: first budgets, then coverages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from artifacts import HeadwiseError, OmniKV
from profiling.inside.decode_capture import StepInputs
from profiling.inside.residual import ResidualStream
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.prompts.prompt import Prompt
from profiling.similarities.layer_similarity import SimilarityConfig, depends_on, watched
from profiling.similarities.mass import attended


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of the choices: a budget or a coverage, and what it comes to over the prompts.

    tokens: that a KV head of a sparse layer reads in a step, on average. error: of the sparse layers' outputs, as
    ResidualStream.relative, summed over the layers, mean over the steps. worst: the largest of a prompt's means.
    """

    budget: int | None
    coverage: float | None
    tokens: float
    error: float
    worst: float


class BudgetMeter:
    """The figures of one prompt; pass `visit` and `done` to capture_decode.

    tokens, errors: (P), summed over the steps.
    """

    def __init__(
        self, section: OmniKV, budgets: Sequence[int], coverages: Sequence[float], most: int, stream: ResidualStream
    ) -> None:
        self.tokens, self.errors = torch.zeros(2, len(budgets) + len(coverages), dtype=torch.float64)
        self._section, self._budgets, self._coverages, self._most = section, budgets, coverages, most
        self._stream = stream
        # By filter layer and the heads that choose: keys with how many of them each point takes.
        self._chosen: dict[int, dict[tuple[int, ...], list[Tensor]]] = {}
        self._changed: dict[int, Tensor] = {}
        self._reads: list[Tensor] = []

    def visit(self, step: int, inputs: StepInputs) -> None:
        """One layer of one step."""
        if step < 0 or inputs.sliding_window is not None:
            return
        layer, chooser = inputs.layer, self._section.filter_of(inputs.layer)
        groups = inputs.k.shape[1]
        by_head = inputs.probabilities.unflatten(0, (groups, -1))
        if layer in self._section.filter_layers:
            rows = [row for at, row in enumerate(self._section.head_map or ()) if self._section.filter_of(at) == layer]
            named = {heads for row in rows for heads in row or ()} | {tuple(range(groups))}
            self._chosen[layer] = {heads: self._lists(by_head[list(heads)].flatten(0, 1)) for heads in named}
        if chooser is None:
            return
        row = (self._section.head_map or {layer: None})[layer] or (tuple(range(groups)),) * groups
        v, changes = inputs.v[0], []
        whole = attended(by_head, v)[:, 0]
        lists = [self._chosen[chooser][heads] for heads in row]
        for point in range(len(self.tokens)):
            parts = [attended(by_head[g, None], v[g, None], lists[g][point][None])[0, 0] for g in range(groups)]
            changes.append((torch.stack(parts) - whole).flatten())
        self._changed[layer] = self._stream.relative(layer, torch.stack(changes))
        self._reads.append(torch.tensor([[len(keys) for keys in each] for each in lists]).double().mean(0))

    def done(self, step: int) -> None:
        """The step's last layer is through."""
        if step < 0:
            return
        for layer, changed in self._changed.items():
            self.errors += (changed * self._stream.gain(layer)).double().cpu()
        if self._reads:
            self.tokens += torch.stack(self._reads).mean(0)
        self._changed.clear()
        self._reads.clear()
        self._chosen.clear()

    def _lists(self, probabilities: Tensor) -> list[Tensor]:
        """For each point the keys that heads with these probabilities (n, K) choose, the newest among them."""
        peaks, sums = probabilities.amax(0), probabilities.sum(0)
        first = torch.full((2,), torch.inf, device=peaks.device)
        by_peak, by_sum = (torch.cat([x[:-1], first[:1]]).argsort(descending=True, stable=True) for x in (peaks, sums))
        before = sums[by_sum].cumsum(0) - sums[by_sum]
        counts = [int((before < share * sums.sum()).sum()) for share in self._coverages]
        return [by_peak[:count] for count in self._budgets] + [
            by_sum[: max(1, min(count, self._most))] for count in counts
        ]


def measure_budgets(
    config: SimilarityConfig,
    loaded: LoadedModel,
    section: OmniKV,
    prompts: Iterable[Prompt],
    *,
    budgets: Sequence[int] = (),
    coverages: Sequence[float] = (),
    most: int,
    ledger: Ledger | None = None,
) -> list[Point]:
    """What a decode section's choices cost with each of these budgets, and with each coverage and `most` tokens.

    Choices are made by the last query. config: as profiling.similarities.layer_similarity.resolve leaves it. ledger:
    keeps what each prompt gave; its settings say of which model that is.

    Raises:
        HeadwiseError: no layer is sparse.
    """
    prompts = list(prompts)

    def of_prompt(prompt: Prompt, shown: Phase) -> list[list[float]]:
        meter = watched(config, loaded, prompt, shown, lambda s, _: BudgetMeter(section, budgets, coverages, most, s))
        if not meter.errors.any():
            raise HeadwiseError("no layer is sparse: there is nothing whose budget could be measured")
        return [(summed / config.steps).tolist() for summed in (meter.tokens, meter.errors)]

    depends: dict[str, Any] = {"budgets": list(budgets), "coverages": list(coverages), "most": most}
    depends |= section.model_dump(mode="json", include={"filter_layers", "dense_layers", "head_map"})
    found = []
    with phase("decoding by budgets", len(prompts) * config.steps, "steps") as shown:
        for prompt in prompts:
            if ledger is None:
                found.append(of_prompt(prompt, shown))
                continue
            unit = ledger.unit("budgets", {**depends_on(config, prompt), **depends})
            shown.skip(config.steps if unit in ledger else 0)
            found.append(ledger.once(unit, partial(of_prompt, prompt, shown)))
    tokens, errors = zip(*found, strict=True)
    kinds = [(budget, None) for budget in budgets] + [(None, share) for share in coverages]
    means = zip(kinds, np.mean(tokens, 0), np.mean(errors, 0), np.max(errors, 0), strict=True)
    return [
        Point(budget=budget, coverage=share, tokens=float(read), error=float(error), worst=float(worst))
        for (budget, share), read, error, worst in means
    ]
