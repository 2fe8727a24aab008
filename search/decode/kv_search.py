"""How many tokens each KV head keeps: curves of error against budget are measured, and a total
spent by them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from artifacts import H2O, Artifact, Full, HeadwiseError, KVCache, ModelInfo
from artifacts.cli import arguments
from artifacts.cli.options import SHARE, arg, at_least, check_ranges, option, shared
from artifacts.schema.kv_cache import Policy
from profiling.caches.budget_curves import BudgetCurves, measure
from profiling.caches.policies import with_policy, with_section
from profiling.ledger import Ledger
from profiling.memory_use.config import bytes_of
from profiling.models.loading import LoadedModel, settled
from profiling.progress import phase
from profiling.prompts.prompt import Prompt, digest, make_prompts
from profiling.quality.forced_decode import Divergence, divergence
from runtime.layers import attention_layers, sliding_layers, window_of
from search.decode.section_search import SectionSearch, beyond_chance
from search.model.hulls import spend


@dataclass(frozen=True, kw_only=True)
class KVSearch:
    """What to choose by: `share` of all tokens, or `target_bytes` of a cache of `context`
    tokens."""

    model: str = shared(arguments.add_model)
    config: Path = shared(
        arguments.add_artifact, "artifact to start from, as headwise search writes it"
    )
    out: Path = shared(arguments.add_out, "artifact to write; may be the same file")
    share: float | None = arg(
        "--target-share",
        default=None,
        either="total",
        within=SHARE,
        help="keep this share of all tokens, such as 0.2",
    )
    target_bytes: int | None = option(
        "bytes of a sequence's cache at --context tokens, such as 64MiB",
        default=None,
        either="total",
        read=lambda text: bytes_of(text, "--target-bytes"),
    )
    context: int | None = option(
        "tokens that --target-bytes is for", default=None, within=at_least(1)
    )
    tasks: tuple[str, ...] = shared(
        arguments.add_task,
        "prompts to measure on (default multi_hop passkey)",
        default=("multi_hop", "passkey"),
    )
    length: int = shared(
        arguments.add_length,
        "their length in tokens (default %(default)s)",
        default=2048,
        within=at_least(256),
    )
    samples: int = option("of each task", default=2, within=at_least(1), advanced=True)
    forced: int = option(
        "tokens of each held-out prompt decoded", default=128, within=at_least(1), advanced=True
    )
    normalised: bool = option(
        "divide scores by how many queries could see a token (default), or keep H2O's sums",
        action=argparse.BooleanOptionalAction,
        default=True,
        advanced=True,
    )
    seed: int = shared(arguments.add_seed, default=0)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")
    fresh: bool = shared(arguments.add_fresh, default=False)

    def __post_init__(self) -> None:
        check_ranges(self)
        if (self.target_bytes is None) != (self.context is None):
            raise HeadwiseError(
                "--target-bytes and --context go together: bytes of a cache of so many tokens"
            )
        if self.forced >= self.length:
            raise HeadwiseError(
                f"--forced must be below --length ({self.length}), got {self.forced}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class KVFound:
    """What was chosen, and how it and the same total spent evenly do on held-out prompts. `share`
    is what it uses.

    better: whether it was beyond chance on one set of them, by which was decided what is written.
    searched, even: on another set."""

    section: KVCache
    share: float
    better: bool
    searched: Divergence
    even: Divergence
    curves: BudgetCurves


def run(config: KVSearch) -> tuple[Artifact, KVFound]:
    """Measure, choose, compare, and write the artifact; a killed run goes on from the prompts that
    it finished.

    Raises:
        HeadwiseError: anything that the user has to put right; nothing is written then.
    """
    config = settled(config)
    search = SectionSearch.begin(
        "kv", config.config, config.out, config.model, dtype=config.dtype, device=config.device
    )
    loaded = search.loaded
    # What cannot be written is refused before anything is measured.
    everywhere = with_policy(loaded, H2O()).artifact.kv_cache
    assert everywhere is not None
    with_cache(search.artifact, everywhere)
    share = (
        config.share
        if config.share is not None
        else _share_of_bytes(config, search.artifact.model, loaded)
    )
    how: dict[str, Any] = {"length": config.length, "samples": config.samples, "seed": config.seed}
    prompts = [
        prompt for task in config.tasks for prompt in make_prompts(task, loaded.tokenizer, **how)
    ]
    search.seen.add(*prompts)
    # Before any work: a text that is too short to hold prompts out is the user's to know of now.
    lengths = dict.fromkeys(config.tasks, config.length)
    apart = [
        search.held_out(lengths, number, samples=config.samples, seed=config.seed)
        for number in range(2)
    ]
    deciding, reporting = ([*chain.from_iterable(prompts.values())] for prompts in apart)
    with search.ledger(config, fresh=config.fresh) as ledger:
        curves = measure(loaded, prompts, ledger=ledger)
        even = even_section(curves, share, config.normalised)
        section, used = by_error(curves, share, config.normalised)
        decided = [
            diverged(loaded, each, deciding, config.forced, ledger) for each in (section, even)
        ]
        better = beyond_chance(*([one.mean_kl for one in each] for each in decided))
        # What decided does not report.
        searched, evenly = (
            Divergence.joined(diverged(loaded, each, reporting, config.forced, ledger))
            for each in (section, even)
        )
        found = KVFound(
            section=section,
            share=used,
            better=better,
            searched=searched,
            even=evenly,
            curves=curves,
        )
        arrays = {
            "kv.shares": np.array(curves.shares),
            "kv.error": curves.error,
            "kv.kept": curves.kept,
        }
        written = search.write(lambda now: with_cache(now, section if better else even), arrays)
        ledger.remove()
    return written, found


def by_error(curves: BudgetCurves, share: float, normalised: bool = True) -> tuple[KVCache, float]:
    """The section that leaves the least error at a share of all tokens, and the share that it uses.

    Raises:
        HeadwiseError: the share is below what the smallest budgets need.
    """
    layers = curves.layers
    sizes = (*curves.shares, 1.0)
    costs = np.concatenate(
        [curves.error[layers], np.zeros((len(layers), curves.error.shape[1], 1))], axis=-1
    )
    costs = costs.reshape(-1, len(sizes))
    if share < sizes[0]:
        raise HeadwiseError(
            f"a share of {share:.4f} is below the least that was measured, {sizes[0]:.4f}"
        )
    at = spend(costs, sizes, share * len(costs)).entries
    names = [_name(sizes[entry]) for entry in at]
    policies: dict[str, Policy] = {
        _name(size): _policy(size, normalised) for size in sizes if _name(size) in names
    }
    heads = curves.error.shape[1]
    rows: list[Any] = [None] * len(curves.error)
    for i, layer in enumerate(layers):
        row = tuple(names[i * heads : (i + 1) * heads])
        rows[layer] = row[0] if len(set(row)) == 1 else row
    return KVCache(policies=policies, layers=tuple(rows)), sum(sizes[entry] for entry in at) / len(
        at
    )


def even_section(curves: BudgetCurves, share: float, normalised: bool = True) -> KVCache:
    """The same share for every head."""
    rows = tuple("even" if layer in curves.layers else None for layer in range(len(curves.error)))
    return KVCache(policies={"even": _policy(share, normalised)}, layers=rows)


def _policy(share: float, normalised: bool) -> Full | H2O:
    return Full() if share >= 1 else H2O(heavy=share / 2, recent=share / 2, normalised=normalised)


def _name(share: float) -> str:
    return "full" if share >= 1 else f"h2o_{share:.4g}"


def diverged(
    loaded: LoadedModel, section: KVCache, prompts: Sequence[Prompt], forced: int, ledger: Ledger
) -> list[Divergence]:
    """How far decode under a section is from decode with a full cache, prompt by prompt."""
    full = partial(with_section(loaded, None).new_cache, loaded.model)
    headwise = with_section(loaded, section)
    # The full cache under the same attention, so that only what is dropped differs.
    kept = partial(headwise.new_cache, loaded.model)

    def measured(prompt: Prompt) -> dict[str, Any]:
        return asdict(divergence(loaded.model, full, kept, prompt, forced))

    found = []
    with (
        phase("held-out prompts", len(prompts), "prompts") as shown,
        headwise.apply(loaded.model, check_weights=False),
    ):
        for prompt in prompts:
            depends = {
                "section": section.model_dump(mode="json"),
                "prompt": digest([prompt]),
                "forced": forced,
            }
            found.append(
                Divergence(
                    **ledger.once(ledger.unit("divergence", depends), partial(measured, prompt))
                )
            )
            shown.update()
    return found


def with_cache(artifact: Artifact, section: KVCache) -> Artifact:
    """The artifact with this kv_cache section; its other sections stay.

    Raises:
        HeadwiseError: they do not go together.
    """
    try:
        return Artifact(**{**dict(artifact), "kv_cache": section})
    except ValidationError as error:
        raise HeadwiseError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _share_of_bytes(config: KVSearch, model: ModelInfo, loaded: LoadedModel) -> float:
    """The share of tokens that layers which see everything may keep, after what sliding layers hold
    anyway."""
    assert config.target_bytes is not None and config.context is not None
    modules = attention_layers(loaded.model)
    sliding = sliding_layers(modules)
    token = 2 * model.num_kv_heads * model.head_dim * loaded.model.dtype.itemsize
    windows = sum(min(config.context, window_of(modules[layer])) * token for layer in sliding)
    full = (len(modules) - len(sliding)) * config.context * token
    share = (config.target_bytes - windows) / full
    if share <= 0:
        raise HeadwiseError(
            f"--target-bytes {config.target_bytes} is too small: sliding layers alone hold "
            f"{windows} bytes"
        )
    return min(share, 1.0)


def record(found: KVFound) -> dict[str, Any]:
    """The figures of the report as plain data."""
    scores = {"searched": found.searched, "even": found.even}
    return {
        "share": found.share,
        "budgets": _budgets(found),
        "better": found.better,
        "held_out": {
            name: {"kl": score.mean_kl, "perplexity_ratio": score.perplexity_ratio}
            for name, score in scores.items()
        },
    }


def _budgets(found: KVFound) -> dict[str, int]:
    """How many heads keep what, by the policies' names."""
    heads = found.curves.error.shape[1]
    rows = (
        found.section.heads(layer, heads)
        for layer, row in enumerate(found.section.layers)
        if row is not None
    )
    counts = Counter(name for row in rows for name in row or ())
    return {name: counts[name] for name in found.section.policies}


def report(found: KVFound) -> str:
    """What was chosen, and what it is worth beside the same total spent evenly."""
    budgets = ", ".join(f"{name} x{count}" for name, count in _budgets(found).items())
    lines = [
        f"{found.share:.4f} of all tokens are kept: {budgets}",
        "held-out prompts that decided nothing, against a full cache:",
        f"  searched   KL {found.searched.mean_kl:.5f}  perplexity "
        f"{100 * (found.searched.perplexity_ratio - 1):+.2f}%",
        f"  even       KL {found.even.mean_kl:.5f}  perplexity "
        f"{100 * (found.even.perplexity_ratio - 1):+.2f}%",
    ]
    if not found.better:
        where = "on the held-out prompts that decide (--samples gives more)"
        lines.append(f"even is what is written: {where} searched was not better beyond chance")
    return "\n".join(lines)
