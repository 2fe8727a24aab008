"""The search with a budget for each head: MInference 1.0, Algorithm 1 (kernel-aware sparse pattern search).

Every candidate is brought to the same computed tiles, run through the kernels that will serve, and the one nearest to
dense attention's output wins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from artifacts import Artifact, Calibration, ModelInfo
from artifacts.files import check_writable
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import digest, make_prompts, parse_task
from profiling.ranks import one_process
from runtime.fingerprint import fingerprint
from search.common.layers import score_layers, searched_layers, serving_backend
from search.model.prompts import check_positions
from search.published.config import DEFAULT_BUDGET, HeadSearch
from search.published.record import build_artifact
from search.published.score import HeadBudget, mean_scores
from search.published.space import PAPER_BUDGET, PAPER_LENGTH, initial_space, target_tiles


def run(config: HeadSearch) -> Artifact:
    """Search and write `config.out` with its sidecar; a killed run goes on from the layers it finished.

    Raises:
        HeadwiseError: anything the user has to put right; no file is written then.
    """
    one_process("search.heads --allocation heads")
    check_writable(config.out)
    if config.calibration is not None:
        parse_task(config.calibration)
    if config.length is not None and config.budget is not None:
        target_tiles(config.budget, config.length, config.tail)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, revision=config.revision)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    return search_model(resolve(config, model), loaded, model)


def search_model(config: HeadSearch, loaded: LoadedModel, model: ModelInfo) -> Artifact:
    """The search on a model that is loaded and fingerprinted; `config` has no defaults left open."""
    layers = searched_layers(loaded)
    backend = serving_backend(config.backend, model, config.dtype, config.device)
    assert config.length is not None and config.budget is not None and config.calibration is not None
    target = target_tiles(config.budget, config.length, config.tail)
    how: dict[str, Any] = {"length": config.length, "samples": config.samples, "seed": config.seed}
    prompts = make_prompts(config.calibration, loaded.tokenizer, **how)
    families = initial_space(config.length, scaled=config.preset == "scaled")
    windows = Seen(prompts).digests
    calibration = Calibration(
        tasks=(parse_task(config.calibration).name,),
        lengths=(config.length,),
        samples=config.samples,
        sha256=digest(prompts),
        seen_windows=len(windows),
    )
    # All that a layer's scores depend on.
    settings = {
        "allocation": "heads",
        "model": model.name,
        "weights": model.weights_sha256,
        "budget": config.budget,
        "preset": config.preset,
        "calibration": calibration.tasks[0],
        **how,
        "prompts": calibration.sha256,
        "dtype": config.dtype,
        "device": config.device,
        "backend": backend,
        "dense tail": config.tail,
        "target tiles": target,
        "space": [family.name for family in families],
    }

    rule = HeadBudget(families=families, target=target, dense_tail=config.tail, backend=backend)
    with Ledger(config.out, "heads", settings=settings, fresh=config.fresh) as ledger:
        scores = score_layers(
            loaded, prompts, {layer: {} for layer in layers}, rule.score, ledger, "scoring candidates"
        )
        artifact = build_artifact(
            config,
            model,
            calibration,
            families,
            [mean_scores(scores[layer]) if layer in scores else None for layer in range(model.num_layers)],
            target_density=target / target_tiles("1", config.length, 0),
            kernel_backend=backend,
            windows=windows,
        )
        if config.picture:
            from profiling.pattern_map import draw_pattern_map

            draw_pattern_map(config.out, config.out.with_suffix(""))
        ledger.remove()
    return artifact


def resolve(config: HeadSearch, model: ModelInfo) -> HeadSearch:
    """Fill in the defaults that depend on the preset and the model; refuse a length past its positions."""
    paper = config.preset == "paper"
    length = config.length or (PAPER_LENGTH if paper else min(PAPER_LENGTH, model.max_positions))
    if not config.beyond_positions:
        check_positions(length, model)
    return replace(
        config,
        # Patterns found on the paper's UUIDs serve prose worse than patterns found on a key hidden in prose.
        calibration=config.calibration or ("kv_retrieval" if paper else "passkey"),
        length=length,
        budget=config.budget or (PAPER_BUDGET if paper else DEFAULT_BUDGET),
        # Sizes are token counts: at half the length they cover about twice the share, and there sparsity stops paying.
        dense_below=config.dense_below if config.dense_below is not None else length // 2,
    )
