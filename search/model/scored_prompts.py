"""Curves of prompts: one dense pass forward and back a prompt, on which candidates are scored.

Prompts and their layers are dealt to the ranks; each layer of each prompt is a unit of the resume
file.

Shapes: H query heads, C candidates.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from artifacts import HeadwiseError
from kernels.patterns import Pattern
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.gradients import LayerGradients, gradient_pass
from profiling.inside.head_fidelity import dense_of_layer
from profiling.inside.residual import ResidualStream
from profiling.ledger import Unit
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.quality.sequences import Reference, TokenSequence
from runtime.devices import execution_device
from search.model.curves import Curves
from search.model.run import SearchRun
from search.model.scoring import Scores, score_layer

_SUMS = tuple(field.name for field in fields(Scores))


def score_prompts(run: SearchRun, reference: Reference) -> tuple[dict[int, Curves], str | None]:
    """Score all sequences of a reference, which learns dense attention's predictions on the way.

    Returns:
        Mean curves over the prompts by dense tail, and the reason why gradients are missing, None
        where they are not.

    Raises:
        HeadwiseError: a layer computes numbers that its dtype cannot hold.
    """
    ranks = run.ranks
    units = {
        (number, layer): run.ledger.unit(
            f"scores of layer {layer}", {"sequence": sequence.digest, "layer": layer}
        )
        for number, sequence in enumerate(reference.sequences)
        for layer in run.layers
    }
    scores: dict[tuple[int, int], Any] = {}
    for key, unit in units.items():
        value = run.ledger.get(unit)
        if value is not None:
            scores[key] = value
    # No rank repeats what another one has finished.
    finished = ranks.gather_all([list(key) for key in scores])
    done = {(int(number), int(layer)) for keys in finished for number, layer in keys}
    left = sorted(key for key in units if key not in done)
    # Ranks that share a sequence each make its dense pass, and score other layers of it.
    mine = ranks.deal(left, lambda unit: unit[0])
    with phase("scoring candidates", len(units), "layers", quiet=not ranks.is_first) as shown:
        shown.skip(len(units) - len(left))
        for number in sorted({number for number, _ in mine}):
            layers = {layer for own, layer in mine if own == number}
            shown.note(reference.sequences[number].task)
            scores |= _score(run, run.candidates, reference, number, layers, units, shown)
        by_name = {f"{number}/{layer}": value for (number, layer), value in scores.items()}
        values = ranks.gather(by_name)
        shown.update(len(left) - len(mine))
    by_prompt = []
    for number, sequence in enumerate(reference.sequences):
        by_layer = {layer: values[f"{number}/{layer}"] for layer in run.layers}
        by_prompt.append(_curves(run, sequence, by_layer))
    faults = [str(value["fault"]) for value in values.values() if value["fault"]]
    curves = {tail: Curves.mean([each[tail] for each in by_prompt]) for tail in run.tails}
    return curves, faults[0] if faults else None


def _score(
    run: SearchRun,
    candidates: Sequence[Pattern],
    reference: Reference,
    number: int,
    layers: set[int],
    units: Mapping[tuple[int, int], Unit],
    shown: Phase,
) -> dict[tuple[int, int], Any]:
    """Score some layers of one sequence, and keep each in the resume file."""
    loaded = run.loaded
    sequence = reference.sequences[number]
    ids = torch.tensor([sequence.ids], device=execution_device(loaded.model), dtype=torch.long)
    answers = torch.zeros(
        len(sequence.ids), dtype=torch.bool, device=execution_device(loaded.model)
    )
    for start, stop in sequence.answers:
        answers[start:stop] = True
    values: dict[tuple[int, int], Any] = {}

    with ResidualStream(loaded.model) as stream:

        def score(gradients: LayerGradients, fault: str | None = None) -> None:
            layer = gradients.inputs.layer
            scores = score_layer(
                gradients,
                stream,
                candidates,
                length=sequence.context,
                tails=run.tails,
                # Every rank draws the same tiles.
                seed=zlib.crc32(f"{sequence.digest} {layer}".encode()),
                gradients=fault is None,
                backend=run.backend,
            )
            gain = float(stream.gain(layer))
            sums = {str(tail): _sums(scores[tail], gain, layer, loaded) for tail in run.tails}
            key = (number, layer)
            values[key] = run.ledger.put(units[key], {"scores": sums, "fault": fault})
            shown.update()

        passed = gradient_pass(
            loaded.model,
            ids,
            answers,
            score,
            wanted=lambda inputs: inputs.layer in layers,
            keep=reference.positions(number),
            backend=run.backend,
        )
        reference.set_dense(number, passed.log_probs, passed.nll, passed.likeliest, passed.margin)
        fault = passed.fault or "a layer's gradients are missing"
        left = {layer for layer in layers if (number, layer) not in values}

        def score_without(inputs: LayerInputs) -> torch.Tensor | None:
            if inputs.layer not in left:
                return None
            out, lse = dense_of_layer(inputs, backend=run.backend)
            by_out = torch.zeros_like(out)
            score(LayerGradients(inputs=inputs, out=out, lse=lse, by_out=by_out), fault)
            return out

        if left:
            capture(loaded.model, ids, score_without)
    return values


def _sums(scores: Scores, gain: float, layer: int, loaded: LoadedModel) -> np.ndarray:
    """(7, H, C) in the order of the fields of Scores."""
    values = np.stack([getattr(scores, name) for name in _SUMS])
    # A norm between attention and stream scales the heads' sum.
    values[_SUMS.index("change")] *= gain
    if not np.isfinite(values).all():
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        raise HeadwiseError(
            f"layer {layer} computes numbers that are not finite in {dtype}: try another --dtype"
        )
    return values


def _curves(
    run: SearchRun, sequence: TokenSequence, by_layer: Mapping[int, Any]
) -> dict[int, Curves]:
    """The curves of one sequence by dense tail."""
    _, *shape = next(iter(by_layer.values()))["scores"][str(run.tails[0])].shape
    has_gradients = all(value["fault"] is None for value in by_layer.values())
    is_text = sequence.is_text and has_gradients
    is_asked = not sequence.is_text and has_gradients
    tokens = sequence.context
    curves = {}
    for tail in run.tails:
        stacked = np.full((len(_SUMS), run.model.num_layers, *shape), np.nan)
        for layer, value in by_layer.items():
            stacked[:, layer] = value["scores"][str(tail)]
        sums = dict(zip(_SUMS, stacked, strict=True))
        fisher = sums["fisher"]
        text_fisher = first_order = answer_fisher = np.where(np.isnan(fisher), np.nan, 0.0)
        if is_text:
            text_fisher = fisher / tokens
            first_order = sums["first_order"] / tokens
        if is_asked:
            answer_fisher = fisher / max(1, sequence.answer_tokens)
        curves[tail] = Curves(
            change=sums["change"] / tokens,
            error=np.sqrt(sums["squared"] / np.maximum(sums["size"], 1e-30)),
            recall=np.minimum(1.0, sums["recall"] / tokens),
            tiles=sums["tiles"],
            text_fisher=text_fisher,
            first_order=first_order,
            answer_fisher=answer_fisher,
            text_tokens=tokens if is_text else 0,
            texts=int(is_text),
            asked=int(is_asked),
        )
    return curves
