"""The search with a budget for each head: MInference 1.0, Algorithm 1 (kernel-aware sparse pattern search).

Every candidate is brought to the same computed tiles,
run through the kernels that will serve, and the one nearest to dense attention's output wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from artifacts import Artifact, Calibration, HeadwiseError, ModelInfo
from artifacts.files import check_writable
from profiling.inside.capture import LayerInputs, capture
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import Phase, phase
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task
from runtime.fingerprint import fingerprint
from search.common.serving import serving_backend
from search.published.config import DEFAULT_BUDGET, DENSE_TAIL, HeadSearch
from search.published.record import build_artifact
from search.published.score import Scores, mean_scores, score_layer
from search.published.space import PAPER_BUDGET, PAPER_LENGTH, Family, initial_space, target_tiles


def run(config: HeadSearch) -> Artifact:
    """Search and write `config.out` with its sidecar; a killed run goes on from the layers it finished.

    Raises:
        HeadwiseError: anything the user has to put right; no file is written then.
    """
    check_writable(config.out)
    if config.calibration is not None:
        parse_task(config.calibration)
    if config.length is not None and config.budget is not None:
        target_tiles(config.budget, config.length, _dense_tail(config))
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, revision=config.revision)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    config = resolve(config, model)
    return search_model(config, loaded, model)


def search_model(config: HeadSearch, loaded: LoadedModel, model: ModelInfo) -> Artifact:
    """The search on a model that is loaded and fingerprinted; `config` has no defaults left open."""
    backend = serving_backend(config.backend, model, config.dtype, config.device)
    config = replace(config, backend=backend)
    assert config.length is not None and config.budget is not None and config.calibration is not None
    dense_tail = _dense_tail(config)
    target = target_tiles(config.budget, config.length, dense_tail)
    prompts = make_prompts(
        config.calibration, loaded.tokenizer, length=config.length, samples=config.samples, seed=config.seed
    )
    families = initial_space(config.length, scaled=config.preset == "scaled")
    windows = Seen(prompts).digests
    calibration = Calibration(
        tasks=(parse_task(config.calibration).name,),
        lengths=(config.length,),
        samples=config.samples,
        sha256=digest(prompts),
        seen_windows=len(windows),
    )
    settings = _settings(config, model, calibration, families, target)
    with Ledger(config.out, "heads", settings=settings, fresh=config.fresh) as ledger:
        with phase("layers", model.num_layers * len(prompts), "layers") as shown:
            for sample, prompt in enumerate(prompts):
                _score_prompt(config, loaded, prompt, sample, families, target, ledger, shown)
        layers = [_layer(ledger, layer, len(prompts)) for layer in range(model.num_layers)]
        if all(scores is None for scores in layers):
            raise HeadwiseError(f"every layer of {model.name} slides over a window already: there is nothing to search")
        artifact = build_artifact(
            config,
            model,
            calibration,
            families,
            layers,
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
    if length > model.max_positions and not config.beyond_positions:
        raise HeadwiseError(
            f"--length {length} is more than the {model.max_positions} positions of {model.name}; "
            "choose a shorter one, or pass --beyond-positions to go past what the model was trained on"
        )
    # Sizes are token counts: at half the length they cover about twice the share, and there sparsity stops paying.
    dense_below = config.dense_below if config.dense_below is not None else length // 2
    return replace(
        config,
        # Patterns found on the paper's UUIDs serve prose worse than patterns found on a key hidden in prose.
        calibration=config.calibration or ("kv_retrieval" if paper else "passkey"),
        length=length,
        budget=config.budget or (PAPER_BUDGET if paper else DEFAULT_BUDGET),
        dense_below=dense_below,
        dense_tail=_dense_tail(config),
    )


def _dense_tail(config: HeadSearch) -> int:
    """Last queries that see every key: none in the paper's search, else enough for a question to find its answer."""
    if config.dense_tail is not None:
        return config.dense_tail
    return 0 if config.preset == "paper" else DENSE_TAIL


def _settings(
    config: HeadSearch, model: ModelInfo, calibration: Calibration, families: Sequence[Family], target: int
) -> dict[str, Any]:
    """All that a layer's scores depend on."""
    return {
        "allocation": "heads",
        "model": model.name,
        "weights": model.weights_sha256,
        "length": config.length,
        "budget": config.budget,
        "preset": config.preset,
        "calibration": calibration.tasks[0],
        "samples": config.samples,
        "seed": config.seed,
        "prompts": calibration.sha256,
        "dtype": config.dtype,
        "device": config.device,
        "backend": config.backend,
        "dense tail": config.dense_tail,
        "target tiles": target,
        "space": [family.name for family in families],
    }


def _score_prompt(
    config: HeadSearch,
    loaded: LoadedModel,
    prompt: Prompt,
    sample: int,
    families: Sequence[Family],
    target: int,
    ledger: Ledger,
    shown: Phase,
) -> None:
    """One forward pass over a prompt; each layer that the ledger lacks is scored as the pass comes by."""

    def visit(inputs: LayerInputs) -> None:
        unit = ledger.unit(f"layer {sample}.{inputs.layer}")
        if unit in ledger:
            shown.skip()
            return
        if inputs.sliding_window is not None:
            ledger.put(unit, {"slides": inputs.sliding_window})
            shown.update()
            return
        settled = ledger.get(ledger.unit(f"layer 0.{inputs.layer}"))["sizes"] if sample else None
        tail = _dense_tail(config)
        ledger.put(unit, score_layer(inputs, families, target, tail, settled, backend=config.backend))
        shown.update()

    # No pass over a prompt whose layers are all finished.
    through = ledger.unit(f"prompt {sample}")
    if through in ledger:
        shown.skip(shown.total // config.samples)
        return
    ids = torch.tensor([prompt.input_ids], device=loaded.model.device)
    capture(loaded.model, ids, visit)
    ledger.put(through, True)


def _layer(ledger: Ledger, layer: int, samples: int) -> Scores | None:
    """A layer's scores averaged over the prompts; None for a layer that slides or has no attention."""
    found = [ledger.get(ledger.unit(f"layer {sample}.{layer}")) for sample in range(samples)]
    return None if found[0] is None or "slides" in found[0] else mean_scores(found)
