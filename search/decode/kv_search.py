"""How many tokens each KV head keeps: curves of error against budget are measured, and a total spent by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from artifacts import H2O, Artifact, Full, HeadwiseError, KVCache, ModelInfo, load, load_arrays
from artifacts.files import check_writable
from artifacts.kv_cache import Policy
from profiling.caches.budget_curves import BudgetCurves, measure
from profiling.caches.policies import with_policy, with_section
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import phase
from profiling.prompts.held_out import Seen, held_out
from profiling.prompts.prompt import Prompt, digest, make_prompts
from profiling.quality.divergence import Divergence, divergence
from runtime.fingerprint import check
from runtime.layers import attention_layers, sliding_layers, window_of
from search.common.amending import amend
from search.model.hulls import spend

if TYPE_CHECKING:
    from artifacts.sidecar import Array


@dataclass(frozen=True, kw_only=True)
class KVSearch:
    """What to choose by: `share` of all tokens, or `target_bytes` of a cache of `context` tokens."""

    model: str
    config: Path
    out: Path
    share: float | None
    target_bytes: int | None = None
    context: int | None = None
    tasks: tuple[str, ...] = ("multi_hop", "passkey")
    length: int = 2048
    samples: int = 2
    forced: int = 128
    normalised: bool = True
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise HeadwiseError(f"--target-share must be above 0 and at most 1, got {self.share}")
        if (self.target_bytes is None) != (self.context is None):
            raise HeadwiseError("--target-bytes and --context go together: bytes of a cache of so many tokens")
        for name, least in (("length", 256), ("samples", 1), ("forced", 1), ("context", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise HeadwiseError(f"--{name} must be at least {least}, got {value}")
        if self.forced >= self.length:
            raise HeadwiseError(f"--forced must be below --length ({self.length}), got {self.forced}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """What was chosen, and how it and the same total spent evenly do on held-out prompts. `share` is what it uses.

    better: whether it was on one set of them, by which was decided what is written. searched, even: on another set.
    """

    section: KVCache
    share: float
    better: bool
    searched: Divergence
    even: Divergence
    curves: BudgetCurves


def run(config: KVSearch) -> tuple[Artifact, Found]:
    """Measure, choose, compare, and write the artifact; a killed run goes on from the prompts that it finished.

    Raises:
        HeadwiseError: anything that the user has to put right; nothing is written then.
    """
    check_writable(config.out)
    artifact = load(config.config)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    check(artifact.model, loaded.model)
    # What cannot be written is refused before anything is measured.
    everywhere = with_policy(loaded, H2O()).artifact.kv_cache
    assert everywhere is not None
    with_cache(artifact, everywhere)
    share = config.share if config.share is not None else _share_of_bytes(config, artifact.model, loaded)
    prompts = _prompts(config, loaded)
    seen = Seen.by([load_arrays(config.config)])
    # Before any work: a text that is too short to hold prompts out is the user's to know of now.
    deciding, reporting = _held_out(config, loaded, prompts, seen)
    with Ledger(config.out, "kv", settings=_settings(config, artifact), fresh=config.fresh) as ledger:
        curves = measure(loaded, prompts, ledger=ledger)
        even = even_section(curves, share, config.normalised)
        section, used = choose(curves, share, config.normalised)
        searched, evenly = compare(loaded, [section, even], deciding, config.forced, ledger)
        better = searched.mean_kl < evenly.mean_kl
        # What decided does not report.
        searched, evenly = compare(loaded, [section, even], reporting, config.forced, ledger)
        found = Found(section=section, share=used, better=better, searched=searched, even=evenly, curves=curves)
        better_one = section if better else even
        written = amend(
            config.config, config.out, artifact.model, lambda now: with_cache(now, better_one), _arrays(curves), seen
        )
        ledger.remove()
    return written, found


def _settings(config: KVSearch, artifact: Artifact) -> dict[str, Any]:
    """What all that is measured depends on; the total is not among it, so that another one reuses the curves."""
    names = ("length", "seed", "dtype", "device")
    model = {"model": artifact.model.name, "weights": artifact.model.weights_sha256}
    return {**model, **{name: getattr(config, name) for name in names}}


def choose(curves: BudgetCurves, share: float, normalised: bool = True) -> tuple[KVCache, float]:
    """The section that leaves the least error at a share of all tokens, and the share that it uses.

    Raises:
        HeadwiseError: the share is below what the smallest budgets need.
    """
    layers = curves.layers
    sizes = (*curves.shares, 1.0)
    costs = np.concatenate([curves.error[layers], np.zeros((len(layers), curves.error.shape[1], 1))], axis=-1)
    costs = costs.reshape(-1, len(sizes))
    if share < sizes[0]:
        raise HeadwiseError(f"a share of {share:.4f} is below the least that was measured, {sizes[0]:.4f}")
    at = spend(costs, sizes, share * len(costs)).entries
    names = [_name(sizes[place]) for place in at]
    policies: dict[str, Policy] = {_name(size): _policy(size, normalised) for size in sizes if _name(size) in names}
    heads = curves.error.shape[1]
    rows: list[Any] = [None] * len(curves.error)
    for i, layer in enumerate(layers):
        row = tuple(names[i * heads : (i + 1) * heads])
        rows[layer] = row[0] if len(set(row)) == 1 else row
    return KVCache(policies=policies, layers=tuple(rows)), sum(sizes[place] for place in at) / len(at)


def even_section(curves: BudgetCurves, share: float, normalised: bool = True) -> KVCache:
    """The same share for every head."""
    rows = tuple("even" if layer in curves.layers else None for layer in range(len(curves.error)))
    return KVCache(policies={"even": _policy(share, normalised)}, layers=rows)


def _policy(share: float, normalised: bool) -> Full | H2O:
    return Full() if share >= 1 else H2O(heavy=share / 2, recent=share / 2, normalised=normalised)


def _name(share: float) -> str:
    return "full" if share >= 1 else f"h2o_{share:.4g}"


def compare(
    loaded: LoadedModel, sections: list[KVCache], prompts: list[Prompt], forced: int, ledger: Ledger
) -> tuple[Divergence, Divergence]:
    """How far decode under each section is from decode with a full cache."""
    full = partial(with_section(loaded, None).new_cache, loaded.model)
    found = []
    with phase("held-out prompts", len(sections) * len(prompts), "prompts") as shown:
        for section in sections:
            headwise, parts = with_section(loaded, section), []
            with headwise.apply(loaded.model, check_weights=False):
                # The full cache under the same attention, so that only what is dropped differs.
                kept = partial(headwise.new_cache, loaded.model)
                for prompt in prompts:
                    depends = {"section": section.model_dump(mode="json"), "prompt": digest([prompt]), "forced": forced}
                    measured = partial(_measured, loaded, full, kept, prompt, forced)
                    parts.append(Divergence(**ledger.once(ledger.unit("divergence", depends), measured)))
                    shown.update()
            found.append(Divergence.joined(parts))
    return found[0], found[1]


def _measured(loaded: LoadedModel, full: Any, kept: Any, prompt: Prompt, forced: int) -> dict[str, Any]:
    return asdict(divergence(loaded.model, full, kept, prompt, forced))


def with_cache(artifact: Artifact, section: KVCache) -> Artifact:
    """The artifact with this kv_cache section; its other sections stay.

    Raises:
        HeadwiseError: they do not go together.
    """
    try:
        return Artifact(**{**dict(artifact), "kv_cache": section})
    except ValidationError as error:
        raise HeadwiseError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _arrays(curves: BudgetCurves) -> dict[str, Array]:
    return {
        "kv.shares": np.array(curves.shares, dtype=np.float32),
        "kv.error": curves.error.astype(np.float32),
        "kv.kept": curves.kept.astype(np.float32),
    }


def _prompts(config: KVSearch, loaded: LoadedModel) -> list[Prompt]:
    how: dict[str, Any] = {"length": config.length, "samples": config.samples, "seed": config.seed}
    return [prompt for task in config.tasks for prompt in make_prompts(task, loaded.tokenizer, **how)]


def _held_out(
    config: KVSearch, loaded: LoadedModel, prompts: Sequence[Prompt], seen: Seen
) -> tuple[list[Prompt], list[Prompt]]:
    """Two sets of prompts, each unlike those before it, which `seen` learns of."""
    sets: list[list[Prompt]] = []
    seen.add(*prompts)
    how: dict[str, Any] = {"length": config.length, "samples": config.samples, "seed": config.seed, "seen": seen}
    for number in range(2):
        sets.append(held_out(config.tasks, loaded.tokenizer, **how, number=number))
        seen.add(*sets[-1])
    return sets[0], sets[1]


def _share_of_bytes(config: KVSearch, model: ModelInfo, loaded: LoadedModel) -> float:
    """The share of tokens that layers which see everything may keep, after what sliding layers hold anyway."""
    assert config.target_bytes is not None and config.context is not None
    modules = attention_layers(loaded.model)
    sliding = sliding_layers(modules)
    token = 2 * model.num_kv_heads * model.head_dim * loaded.model.dtype.itemsize
    windows = sum(min(config.context, window_of(modules[layer])) * token for layer in sliding)
    full = (len(modules) - len(sliding)) * config.context * token
    share = (config.target_bytes - windows) / full
    if share <= 0:
        raise HeadwiseError(
            f"--target-bytes {config.target_bytes} is too small: sliding layers alone hold {windows} bytes"
        )
    return min(share, 1.0)


def report(found: Found) -> str:
    """What was chosen, and what it is worth beside the same total spent evenly."""
    counts = Counter(
        name
        for layer, row in enumerate(found.section.layers)
        if row is not None
        for name in (found.section.heads(layer, found.curves.error.shape[1]) or ())
    )
    budgets = ", ".join(f"{name} x{counts[name]}" for name in found.section.policies)
    lines = [
        f"{found.share:.4f} of all tokens are kept: {budgets}",
        "held-out prompts that decided nothing, against a full cache:",
        f"  searched   KL {found.searched.mean_kl:.5f}  perplexity {100 * (found.searched.perplexity_ratio - 1):+.2f}%",
        f"  even       KL {found.even.mean_kl:.5f}  perplexity {100 * (found.even.perplexity_ratio - 1):+.2f}%",
    ]
    if not found.better:
        lines.append("on the held-out prompts that decide even was better, so even is what was written")
    return "\n".join(lines)
