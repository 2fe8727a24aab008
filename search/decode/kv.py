"""headwise kv: choose how many tokens each KV head keeps, for a total, and write the artifact.

    headwise kv cfg.yaml --model smollm2 --out cfg.yaml --target-share 0.2
    headwise kv cfg.yaml --model smollm2 --out cfg.yaml --target-bytes 64MiB --context 8192

Heads that need few tokens leave more to the others. Each head's curve of error against budget is
measured (profiling.caches.budget_curves), the total is spent exactly, and the result is compared
with the same total spent evenly, on held-out prompts; where it is not better beyond chance, even is
written. Other prompts report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from artifacts import H2O, Artifact, HeadwiseError, KVCache, ModelInfo
from artifacts.cli.arguments import (
    ArtifactFile,
    Device,
    Dtype,
    Fresh,
    Json,
    Length,
    ModelName,
    Out,
    Seed,
    deliver,
)
from artifacts.cli.options import ADVANCED, SHARE, Arg, CommandConfig, bytes_of
from profiling.caches.budget_curves import BudgetCurves, measure
from profiling.caches.policies import with_policy, with_section
from profiling.ledger import Ledger
from profiling.models.device import settled
from profiling.models.loading import LoadedModel
from profiling.progress import announce, phase
from profiling.prompts.held_out import unit_means, units
from profiling.prompts.options import LISTED, Tasks
from profiling.prompts.prompt import (
    Prompt,
    Task,
    digest,
    fewer_sentences,
    make_prompts,
)
from profiling.quality.forced_decode import Divergence, divergence
from runtime.layers import attention_layers, check_section, layer_kinds, window_of
from search.decode.budgets import by_error, even_section
from search.decode.section_search import SectionSearch, beyond_chance
from search.study import STORAGE_HELP, Study, check_storage, study_name


class Config(CommandConfig):
    """Config of a search for KV budgets.

    The total is `share` of all tokens, or `target_bytes` of a cache of `context` tokens.
    """

    model: ModelName
    artifact: Annotated[ArtifactFile, Arg("artifact to start from, as headwise search writes it")]
    out: Annotated[Out, Arg("artifact to write; may be the same file")]
    share: Annotated[
        float | None,
        Arg(
            "fraction of all tokens to keep, such as 0.2", either="total", flags=("--target-share",)
        ),
        SHARE,
    ] = None
    target_bytes: Annotated[
        int | None,
        Arg("bytes of a sequence's cache at --context tokens, such as 64MiB", either="total"),
        BeforeValidator(partial(bytes_of, option="--target-bytes")),
    ] = None
    context: Annotated[int | None, Arg("tokens that --target-bytes is for"), Field(ge=1)] = None
    tasks: Annotated[
        Tasks, Arg(f"prompts to measure on (default multi_hop passkey); {LISTED}; repeatable")
    ] = (Task("multi_hop"), Task("passkey"))
    length: Annotated[Length, Arg("their length in tokens (default 2048)"), Field(ge=256)] = 2048
    samples: Annotated[int, Arg("of each task", group=ADVANCED), Field(ge=1)] = 2
    forced: Annotated[
        int, Arg("tokens of each held-out prompt decoded", group=ADVANCED), Field(ge=1)
    ] = 128
    normalised: Annotated[
        bool,
        Arg(
            "divide scores by how many queries could see a token (default), or keep H2O's sums",
            group=ADVANCED,
            both=True,
        ),
    ] = True
    storage: Annotated[str | None, Arg(STORAGE_HELP, group=ADVANCED, metavar="URL")] = None
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    fresh: Fresh = False
    as_json: Json = None
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.target_bytes is None) != (self.context is None):
            raise HeadwiseError(
                "--target-bytes needs --context, and --context needs --target-bytes"
            )
        if self.forced >= self.length:
            raise HeadwiseError(
                f"--forced must be below --length ({self.length}), got {self.forced}"
            )
        return self


@dataclass(frozen=True, eq=False, kw_only=True)
class KVResult:
    """A searched section and the same total spent evenly, on held-out prompts.

    Attributes:
        share: of all tokens that the section keeps.
        better: True if it was better beyond chance on the set of prompts that decides.
        searched, even: on another set.
    """

    section: KVCache
    share: float
    better: bool
    searched: Divergence
    even: Divergence
    curves: BudgetCurves


def run(config: Config) -> int:
    """Search, and print the report."""
    _, result = choose_budgets(config)
    then = f"headwise evaluate {config.out} --model {config.model} --out report/"
    text = (
        f"{report(result)}\nwrote {config.out} ({config.command})\n"
        f"next, compare with other caches: {then}"
    )
    deliver(text, {"command": config.command, **record(result)}, config.as_json)
    return 0


def choose_budgets(config: Config) -> tuple[Artifact, KVResult]:
    """Measure, choose, compare, and write the artifact. A killed run resumes.

    Raises:
        HeadwiseError: a user's mistake; nothing is written then.
    """
    config = settled(config)
    check_storage(config.storage)
    search = SectionSearch.begin(
        "kv", config.artifact, config.out, config.model, dtype=config.dtype, device=config.device
    )
    loaded = search.loaded
    # What cannot be written is refused before anything is measured.
    check_section("kv_cache", attention_layers(loaded.model))
    everywhere = with_policy(loaded, H2O()).artifact.kv_cache
    assert everywhere is not None
    with_cache(search.artifact, everywhere)
    share = config.share
    if share is None:
        share = _share_of_bytes(config, search.artifact.model, loaded)
    prompts = []
    for task in config.tasks:
        prompts += make_prompts(
            task,
            loaded.tokenizer,
            length=config.length,
            samples=config.samples,
            seed=config.seed,
        )
    for line in fewer_sentences(
        config.tasks, prompts, length=config.length, samples=config.samples
    ):
        announce(line)
    search.seen.add(*prompts)
    # Before any work, to refuse a text that is too short to hold prompts out. Two sets: the one
    # that decides does not report.
    sets = {
        name: _held_out(search, config, at) for at, name in enumerate(("deciding", "reporting"))
    }
    with search.ledger(config, fresh=config.fresh) as ledger:
        curves = measure(loaded, prompts, ledger=ledger)
        even = even_section(curves, share, config.normalised)
        section, used = by_error(curves, share, config.normalised)
        sections = {"searched": (section, used), "even": (even, share)}
        losses = {
            (name, budgets): diverged(loaded, each, held_out, config.forced, ledger)
            for name, held_out in sets.items()
            for budgets, (each, _) in sections.items()
        }
        independent = units(sets["deciding"])
        decided = {
            budgets: unit_means([each.mean_kl for each in losses["deciding", budgets]], independent)
            for budgets in sections
        }
        better = beyond_chance(decided["searched"], decided["even"])
        result = KVResult(
            section=section,
            share=used,
            better=better,
            searched=Divergence.joined(losses["reporting", "searched"]),
            even=Divergence.joined(losses["reporting", "even"]),
            curves=curves,
        )
        tasks = list(dict.fromkeys(prompt.task for prompt in sets["deciding"]))
        space = {"share": (0.0, 1.0), "budgets": list(sections)}
        of_this = study_name("kv", config.out)
        study = Study(config.storage, of_this, space, (*tasks, "share"))
        for (name, budgets), measured in losses.items():
            _, spent = sections[budgets]
            joined = Divergence.joined(measured)
            study.add(
                {"share": spent, "budgets": budgets},
                {**_by_task(sets[name], measured), "share": spent},
                prompts=name,
                kl=joined.mean_kl,
                perplexity_ratio=joined.perplexity_ratio,
            )
        arrays = {
            "kv.shares": np.array(curves.shares),
            "kv.error": curves.error,
            "kv.kept": curves.kept,
        }
        if not better:
            section = even
        written = search.write(lambda now: with_cache(now, section), arrays)
        ledger.remove()
    return written, result


def _by_task(prompts: Sequence[Prompt], losses: Sequence[Divergence]) -> dict[str, float]:
    """Mean KL of the prompts of each task, nats a token."""
    tasks: dict[str, list[float]] = {}
    for prompt, loss in zip(prompts, losses, strict=True):
        tasks.setdefault(prompt.task, []).append(loss.mean_kl)
    return {task: float(np.mean(each)) for task, each in tasks.items()}


def _held_out(search: SectionSearch, config: Config, number: int) -> list[Prompt]:
    """A set of held-out prompts; sets of other numbers differ."""
    lengths = dict.fromkeys(config.tasks, config.length)
    by_task = search.held_out(lengths, number, samples=config.samples, seed=config.seed)
    return list(chain.from_iterable(by_task.values()))


def diverged(
    loaded: LoadedModel, section: KVCache, prompts: Sequence[Prompt], forced: int, ledger: Ledger
) -> list[Divergence]:
    """Measure the divergence of decode under a section from a full cache, prompt by prompt."""
    full = partial(with_section(loaded, None).new_cache, loaded.model)
    headwise = with_section(loaded, section)
    # The full cache under the same attention, so that only eviction differs.
    evicting = partial(headwise.new_cache, loaded.model)

    def measured(prompt: Prompt) -> dict[str, Any]:
        return asdict(divergence(loaded.model, full, evicting, prompt, forced))

    divergences = []
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
            unit = ledger.unit("divergence", depends)
            divergences.append(Divergence(**ledger.once(unit, partial(measured, prompt))))
            shown.update()
    return divergences


def with_cache(artifact: Artifact, section: KVCache) -> Artifact:
    """The artifact with this kv_cache section; its other sections stay.

    Raises:
        HeadwiseError: they do not go together.
    """
    try:
        return Artifact(**{**dict(artifact), "kv_cache": section})
    except ValidationError as error:
        raise HeadwiseError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _share_of_bytes(config: Config, model: ModelInfo, loaded: LoadedModel) -> float:
    """The fraction of tokens for full-attention layers, after the windows of others."""
    assert config.target_bytes is not None and config.context is not None
    modules = attention_layers(loaded.model)
    kinds = layer_kinds(modules)
    local = [modules[layer] for layer, kind in kinds.items() if kind != "full"]
    token = 2 * model.num_kv_heads * model.head_dim * loaded.model.dtype.itemsize
    windows = sum(min(config.context, window_of(module)) * token for module in local)
    full = (len(modules) - len(local)) * config.context * token
    share = (config.target_bytes - windows) / full
    if share <= 0:
        raise HeadwiseError(
            f"--target-bytes {config.target_bytes} is too small: layers that slide or attend "
            f"within chunks hold {windows} bytes"
        )
    return min(share, 1.0)


def record(result: KVResult) -> dict[str, Any]:
    """The figures of the report as plain data."""
    scores = {"searched": result.searched, "even": result.even}
    return {
        "share": result.share,
        "budgets": _budgets(result),
        "better": result.better,
        "held_out": {
            name: {"kl": score.mean_kl, "perplexity_ratio": score.perplexity_ratio}
            for name, score in scores.items()
        },
    }


def _budgets(result: KVResult) -> dict[str, int]:
    """Number of heads by the name of their policy."""
    heads = result.curves.error.shape[1]
    rows = (
        result.section.heads(layer, heads)
        for layer, row in enumerate(result.section.layers)
        if row is not None
    )
    counts = Counter(name for row in rows for name in row or ())
    return {name: counts[name] for name in result.section.policies}


def report(result: KVResult) -> str:
    """The budgets chosen, and their losses next to the same total spent evenly."""
    budgets = ", ".join(f"{name} x{count}" for name, count in _budgets(result).items())
    lines = [
        f"{result.share:.4f} of all tokens are retained, by {budgets}",
        "held-out prompts that decided nothing, against a full cache:",
        f"  searched   KL {result.searched.mean_kl:.5f}  perplexity "
        f"{100 * (result.searched.perplexity_ratio - 1):+.2f}%",
        f"  even       KL {result.even.mean_kl:.5f}  perplexity "
        f"{100 * (result.even.perplexity_ratio - 1):+.2f}%",
    ]
    if not result.better:
        lines.append(
            "the even budgets are written: the searched ones were not better beyond chance on the "
            "held-out prompts that decide (more --samples may show it)"
        )
    return "\n".join(lines)
