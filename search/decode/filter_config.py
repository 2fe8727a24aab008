"""What a search for filter layers is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from artifacts import HeadwiseError, arguments
from artifacts.options import BETWEEN_0_AND_1, POSITIVE, at_least, check_ranges, option, shared
from profiling.similarities.layer_similarity import SimilarityConfig
from search.decode.filter_layers import Rules
from search.decode.head_map import KINDS
from search.decode.rules import RULES


def _budget(text: str) -> int | float:
    try:
        budget = float(text) if "." in text else int(text)
    except ValueError:
        budget = 0
    if budget <= 0 or (isinstance(budget, float) and budget >= 1):
        raise HeadwiseError(f"--budget must be a number of tokens or a share between 0 and 1, got {text!r}")
    return budget


def _layers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise HeadwiseError(f"{option} must be layer numbers with commas between, such as 2,8,18, got {text!r}")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True, kw_only=True)
class FilterSearch:
    """What to choose by. `profile` is measured if None; `layers` and `dense_layers` are taken instead of the best.

    heads: whose choice a KV head takes: all heads' together ("pooled"), also a single head's ("head"), also a group's
    ("group"); None: all heads' together, unless another's error on prompts of their own is less beyond chance.
    worst: how much the worst steps count beside the mean, of 1 in all. target_error: the coverage is the least that
    has no more error on the prompts that chose. target_tokens: it reads so many there, on average.
    """

    measured: SimilarityConfig
    rules: Rules
    model: str = shared(arguments.add_model)
    config: Path = shared(arguments.add_artifact, "artifact to start from, as search.heads writes it", old="--config")
    out: Path = shared(arguments.add_out, "artifact to write; may be the same file")
    profile: Path | None = option("folder of python -m profiling.similarity, instead of measuring", default=None)
    heads: str | None = option(
        "whose tokens a KV head takes: all heads' together, also a single head's, also a group's (default: "
        "the first, unless another is better beyond chance on prompts that chose neither)",
        choices=KINDS,
        default=None,
    )
    rule: str = option("whose rule chooses (default error, ours)", choices=RULES, default=RULES[0])
    worst: float = option(
        "weight of the worst steps", default=0.25, within=(lambda value: 0 <= value <= 1, "from 0 to 1")
    )
    max_error: float | None = option(
        "the fewest full layers within this error, not the best",
        default=None,
        within=(lambda value: 0 <= value < inf, "at least 0"),
    )
    layers: tuple[int, ...] | None = option(
        "filter layers by hand, such as 2,8,18", default=None, read=partial(_layers, "--layers")
    )
    dense_layers: tuple[int, ...] | None = option(
        "with --layers: layers that stay dense besides those before the first",
        default=None,
        read=partial(_layers, "--dense-layers"),
    )
    budget: int | float = option("tokens of a sparse layer, or a share such as 0.125", default=2048, read=_budget)
    coverage: float | None = option(
        "stop earlier where this share of the attention is chosen (top-p)", default=None, within=BETWEEN_0_AND_1
    )
    target_error: float | None = option(
        "find the least --coverage within this error on the prompts", default=None, within=POSITIVE
    )
    target_tokens: float | None = option(
        "find the --coverage that reads so many tokens, on average", default=None, within=POSITIVE
    )
    selector: str = option(choices=("last", "uniform", "exponential"), default="last")
    window: int = option("queries of the selector", default=16, within=at_least(1))
    prefill_ratio: float | None = option(
        "in chunked prefill, tokens of the past for each of the chunk", default=None, within=POSITIVE
    )
    fresh: bool = shared(arguments.add_fresh, default=False)

    def __post_init__(self) -> None:
        check_ranges(self)
        given = [option for option in ("layers", "max_error") if getattr(self, option) is not None]
        if len(given) > 1:
            raise HeadwiseError("--layers and --max-error exclude each other: choose by one of them")
        if self.rule != RULES[0] and given:
            raise HeadwiseError(f"--rule {self.rule} chooses by itself: leave out --{given[0].replace('_', '-')}")
        if self.rule == "kascade" and self.heads == "pooled":
            raise HeadwiseError("--rule kascade maps KV heads one to one: leave out --heads pooled")
        if self.rule == "loss" and self.heads not in (None, "pooled"):
            raise HeadwiseError(f"--rule loss has one choice for all heads: leave out --heads {self.heads}")
        if self.dense_layers is not None and self.layers is None:
            raise HeadwiseError("--dense-layers goes with --layers: else the search chooses both")
        if sum(each is not None for each in (self.coverage, self.target_error, self.target_tokens)) > 1:
            raise HeadwiseError(
                "--coverage, --target-error and --target-tokens exclude each other: the latter two find the first"
            )
