"""MInference 1.0, Algorithm 1: kernel-aware sparse pattern search, a budget for each head.

Every candidate is brought to the same computed tiles on one prompt, run through the kernels that
will serve, and the one nearest to dense attention's output wins.

Shapes: L layers, H query heads, G KV heads, S prompt length, D head dim, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import torch

from artifacts import (
    Artifact,
    Calibration,
    HeadwiseError,
    ModelInfo,
    Prefill,
    SearchInfo,
    Summary,
    pattern_name,
    window_arrays,
)
from artifacts.analysis.sections import save_searched
from artifacts.cli.command import one_process
from artifacts.files import check_writable
from kernels.index import with_dense_tail
from kernels.patterns import Pattern
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import dense_of_layer, index_fidelity
from profiling.ledger import Ledger
from profiling.models.device import settled
from profiling.models.loading import load_model
from profiling.progress import phase
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task
from runtime.fingerprint import fingerprint
from search.model.layers import searched_layers, serving_backend
from search.model.prompts import check_positions
from search.model.rows import as_artifact_pattern, rows_of, score_arrays, winners
from search.model.scoring import estimate_of, prepare_all
from search.published.config import HeadSearch
from search.published.space import (
    SPACE,
    change_space,
    moved,
    sizes,
    target_tiles,
)

_MEASURES = ("error", "recall", "density")
Scores = Mapping[str, np.ndarray]
"""(H, C) each of a layer: error, recall and density as in profiling.inside.head_fidelity; steps:
from the candidate's start; within: whether it keeps to the budget."""


def run(config: HeadSearch) -> Artifact:
    """Search, and write `config.out` with its sidecar; a killed run resumes.

    Raises:
        HeadwiseError: a user's mistake; no file is written then.
    """
    one_process("headwise search --preset paper")
    config = settled(config)
    check_writable(config.out)
    parse_task(config.calibration)
    target = target_tiles(config.budget, config.length, config.dense_tail)
    loaded = load_model(
        config.model, dtype=config.dtype, device=config.device, revision=config.revision
    )
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    if not config.beyond_positions:
        check_positions(config.length, model)
    layers = searched_layers(loaded)
    backend = serving_backend(config.backend, model, config.dtype, config.device)
    (prompt,) = make_prompts(
        config.calibration, loaded.tokenizer, length=config.length, samples=1, seed=config.seed
    )
    # All that a layer's scores depend on.
    settings = {
        "allocation": "heads",
        "model": model.name,
        "weights": model.weights_sha256,
        "prompts": digest([prompt]),
        "dtype": config.dtype,
        "device": config.device,
        "backend": backend,
        "dense tail": config.dense_tail,
        "target tiles": target,
        "space": [repr(start) for start in SPACE],
    }
    with Ledger(config.out, "heads", settings=settings, fresh=config.fresh) as ledger:
        units = {layer: ledger.unit("scores", {"layer": layer}) for layer in layers}
        left = [layer for layer, unit in units.items() if unit not in ledger]
        with phase("scoring candidates", len(layers), "layers") as shown:
            shown.skip(len(layers) - len(left))

            def visit(inputs: LayerInputs) -> None:
                if inputs.layer in left:
                    scores = score(
                        inputs, target=target, dense_tail=config.dense_tail, backend=backend
                    )
                    ledger.put(units[inputs.layer], scores)
                    shown.update()

            if left:
                capture(
                    loaded.model,
                    torch.tensor([prompt.input_ids], device=loaded.model.device, dtype=torch.long),
                    visit,
                )
        scores = {layer: ledger.get(unit) for layer, unit in units.items()}
        artifact = _write(config, model, prompt, scores, target=target, backend=backend)
        ledger.remove()
    return artifact


def score(inputs: LayerInputs, *, target: int, dense_tail: int, backend: str) -> Scores:
    """The scores of all heads and candidates of a layer, q (1, H, S, D), k (1, G, S, D) and v.

    Args:
        target: tiles that a head may compute, with the last `dense_tail` queries that see every
            key.
    """
    heads, length = inputs.q.shape[1:3]
    dense = dense_of_layer(inputs, backend=backend)
    # No size means more than the prompt's length.
    builders = prepare_all(
        inputs, [replace(start, **dict.fromkeys(sizes(start), length)) for start in SPACE]
    )
    scores = {name: np.empty((heads, len(SPACE))) for name in _MEASURES}
    scores["steps"] = np.empty((heads, len(SPACE)), dtype=int)
    scores["within"] = np.empty((heads, len(SPACE)), dtype=bool)
    for c, start in enumerate(SPACE):
        build = builders[estimate_of(start)]
        steps = change_space(
            start, target, build, num_heads=heads, length=length, dense_tail=dense_tail
        )
        index = with_dense_tail(build([moved(start, n) for n in steps]), dense_tail)
        fidelity = index_fidelity(inputs, index, dense=dense, backend=backend)
        for name in _MEASURES:
            scores[name][:, c] = getattr(fidelity, name)
        scores["steps"][:, c] = steps
        scores["within"][:, c] = index.computed_tiles()[0].cpu().numpy() <= target
    return scores


def choose(scores: Scores, layer: int) -> np.ndarray:
    """(H,) candidates within the budget: the one of least error, of equal ones the cheapest.

    Raises:
        HeadwiseError: a head has none within the budget.
    """
    without = np.flatnonzero(~scores["within"].any(axis=1))
    if without.size:
        raise HeadwiseError(
            f"no candidate keeps to the budget for head {layer}.{without[0]}: the cheapest "
            f"computes "
            f"{scores['density'][without[0]].min():.3f} of dense attention; ask for a larger "
            f"--budget"
        )
    best: np.ndarray = np.lexsort((scores["density"], scores["error"], ~scores["within"]))[:, 0]
    return best


def _write(
    config: HeadSearch,
    model: ModelInfo,
    prompt: Prompt,
    scores: Mapping[int, Scores],
    *,
    target: int,
    backend: str,
) -> Artifact:
    """Choose a pattern for every head and write the artifact with its sidecar.

    Args:
        scores: by layer.
    """
    shape = (model.num_layers, model.num_heads)
    choice = np.full(shape, -1)
    measures = {name: np.full((*shape, len(SPACE)), np.nan) for name in _MEASURES}
    grown = [{name: np.zeros(shape, dtype=int) for name in sizes(start)} for start in SPACE]
    picked: list[list[Pattern] | None] = [None] * model.num_layers
    for layer, of_layer in scores.items():
        choice[layer] = choose(of_layer, layer)
        picked[layer] = [
            moved(SPACE[c], of_layer["steps"][head, c]) for head, c in enumerate(choice[layer])
        ]
        for name in _MEASURES:
            measures[name][layer] = of_layer[name]
        for (head, c), steps in np.ndenumerate(of_layer["steps"]):
            for name, size in sizes(moved(SPACE[c], steps)).items():
                grown[c][name][layer, head] = size
    rows, patterns = rows_of(picked)
    arrays = score_arrays(
        choice, [pattern_name(as_artifact_pattern(start)) for start in SPACE], measures, grown
    )
    windows = Seen([prompt]).digests
    search = SearchInfo(
        tool_version=version("headwise"),
        command=config.command,
        preset="paper",
        seed=config.seed,
        calibration=Calibration(
            tasks=(parse_task(config.calibration).name,),
            length=config.length,
            samples=1,
            sha256=digest([prompt]),
            seen_windows=len(windows),
        ),
        budget=config.budget,
        spent=float(np.nanmean(arrays["chosen.density"])),
        device=config.device,
        dtype=config.dtype,
        kernel_backend=backend,
        summary=Summary(
            **{name: float(np.nanmean(arrays[f"chosen.{name}"])) for name in _MEASURES},
            winners=winners(rows, patterns),
        ),
    )
    # Sizes are token counts: at half the length they cover about twice the fraction, and there
    # sparsity stops paying.
    prefill = Prefill(
        dense_below=config.length // 2 if config.dense_below is None else config.dense_below,
        dense_tail=config.dense_tail,
        layers=rows,
    )
    artifact = Artifact(model=model, search=search, patterns=patterns, prefill=prefill)
    saved = save_searched(artifact, config.out, arrays | window_arrays(windows))
    if config.picture:
        from profiling.pictures.patterns import draw_pattern_map

        draw_pattern_map(config.out, config.out.with_suffix(""))
    return saved
