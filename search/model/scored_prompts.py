"""Curves of prompts: each prompt is one dense pass forth and back, on which every layer's
candidates are scored.

Prompts and their layers are dealt to the ranks of a launch; each layer of each prompt is a unit of
the ledger."""

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
from profiling.inside.head_fidelity import dense_attention
from profiling.inside.residual import ResidualStream
from profiling.ledger import Unit
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.quality.sequences import Reference, TokenSequence
from profiling.ranks import Ranks
from search.model.curves import Curves
from search.model.scoring import Scores, score_layer
from search.model.setup import Setup

_SUMS = tuple(field.name for field in fields(Scores))


def score_prompts(
    setup: Setup, length: int, reference: Reference
) -> tuple[dict[int, Curves], str | None]:
    """The curves of all sequences of `reference`, which learns what dense attention predicts on
    them.

    Returns:
        Means over the prompts by dense tail, and why no gradients were taken, None where they were.

    Raises:
        HeadwiseError: a layer computes numbers that its dtype cannot hold.
    """
    ranks = setup.launch
    ledger = setup.ledger
    units = {
        (number, layer): ledger.unit(
            f"scores of layer {layer}", {"sequence": one.digest, "layer": layer}
        )
        for number, one in enumerate(reference.sequences)
        for layer in setup.searched
    }
    held = {at: found for at, unit in units.items() if (found := ledger.get(unit)) is not None}
    # What one rank has finished before, no rank does again.
    theirs = ranks.gather_all([list(at) for at in held])
    known = {(int(number), int(layer)) for some in theirs for number, layer in some}
    left = sorted(at for at in units if at not in known)
    mine = _share(left, ranks)
    with phase("scoring candidates", len(units), "layers", quiet=not ranks.is_first) as shown:
        shown.reach(len(units) - len(left))
        for number in sorted({number for number, _ in mine}):
            layers = {layer for one, layer in mine if one == number}
            shown.note(reference.sequences[number].task)
            held |= _score(setup, setup.candidates[length], reference, number, layers, units, shown)
        values = ranks.gather({f"{number}/{layer}": held[number, layer] for number, layer in held})
        shown.reach(len(units))
    by_prompt = [
        _curves(setup, one, {layer: values[f"{number}/{layer}"] for layer in setup.searched})
        for number, one in enumerate(reference.sequences)
    ]
    faults = [str(value["fault"]) for value in values.values() if value["fault"]]
    curves = {tail: Curves.mean([curves[tail] for curves in by_prompt]) for tail in setup.tails}
    return curves, faults[0] if faults else None


def _share(units: Sequence[tuple[int, int]], ranks: Ranks) -> set[tuple[int, int]]:
    """This rank's (sequence, layer) units: as many whole sequences as every rank gets, and some
    layers of what is left.

    Ranks that share a sequence each make its dense pass, and score other layers of it.
    """
    by_number = {number: [unit for unit in units if unit[0] == number] for number, _ in units}
    # Those with the most left to do first.
    numbers = sorted(by_number, key=lambda number: (-len(by_number[number]), number))
    whole = len(numbers) // ranks.count * ranks.count
    mine = {
        unit for number in numbers[ranks.rank : whole : ranks.count] for unit in by_number[number]
    }
    if shared := numbers[whole:]:
        turn, at = divmod(ranks.rank, len(shared))
        sharing = len(range(at, ranks.count, len(shared)))
        mine |= set(by_number[shared[at]][turn::sharing])
    return mine


def _score(
    setup: Setup,
    candidates: Sequence[Pattern],
    reference: Reference,
    number: int,
    layers: set[int],
    units: Mapping[tuple[int, int], Unit],
    shown: Phase,
) -> dict[tuple[int, int], Any]:
    """Some layers of one sequence, kept as they are found."""
    loaded = setup.loaded
    one = reference.sequences[number]
    ids = torch.tensor([one.ids], device=loaded.model.device)
    answers = torch.zeros(len(one.ids), dtype=torch.bool, device=loaded.model.device)
    for start, stop in one.answers:
        answers[start:stop] = True
    found: dict[tuple[int, int], Any] = {}
    fault: str | None = None

    with ResidualStream(loaded.model) as stream:

        def visit(layer: LayerGradients, *, gradients: bool = True) -> None:
            scores = score_layer(
                layer,
                stream,
                candidates,
                length=one.context,
                tails=setup.tails,
                # The same tiles whoever draws them.
                seed=zlib.crc32(f"{one.digest} {layer.inputs.layer}".encode()),
                gradients=gradients,
                backend=setup.backend,
            )
            gain = float(stream.gain(layer.inputs.layer))
            value = {
                str(tail): _sums(scores[tail], gain, layer.inputs.layer, loaded)
                for tail in setup.tails
            }
            at = (number, layer.inputs.layer)
            found[at] = setup.ledger.put(units[at], {"scores": value, "fault": fault})
            shown.update()

        found_pass = gradient_pass(
            loaded.model,
            ids,
            answers,
            visit,
            wanted=lambda inputs: inputs.layer in layers,
            keep=reference.positions(number),
            backend=setup.backend,
        )
        reference.know(number, found_pass.log_probs, found_pass.nll, found_pass.likeliest)
        fault = found_pass.fault
        left = {layer for layer in layers if (number, layer) not in found}

        def without(inputs: LayerInputs) -> torch.Tensor | None:
            if inputs.layer not in left:
                return None
            out, lse = dense_attention(inputs, backend=setup.backend)
            visit(
                LayerGradients(inputs=inputs, out=out, lse=lse, by_out=torch.zeros_like(out)),
                gradients=False,
            )
            return out

        if left:
            fault = fault or "a layer's gradients are missing"
            capture(loaded.model, ids, without)
    return found


def _sums(scores: Scores, gain: float, layer: int, loaded: LoadedModel) -> np.ndarray:
    """(7, H, C) in the order of the fields of Scores."""
    values = np.stack([getattr(scores, name) for name in _SUMS])
    # A norm between attention and stream scales what the heads add.
    values[_SUMS.index("change")] *= gain
    if not np.isfinite(values).all():
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        raise HeadwiseError(
            f"layer {layer} computes numbers that are not finite in {dtype}: try another --dtype"
        )
    return values


def _curves(setup: Setup, one: TokenSequence, by_layer: Mapping[int, Any]) -> dict[int, Curves]:
    """The curves of one sequence by dense tail."""
    _, *shape = next(iter(by_layer.values()))["scores"][str(setup.tails[0])].shape
    known = all(value["fault"] is None for value in by_layer.values())
    text = one.is_text and known
    tokens = one.context
    found = {}
    for tail in setup.tails:
        every = np.full((len(_SUMS), setup.model.num_layers, *shape), np.nan)
        for layer, value in by_layer.items():
            every[:, layer] = value["scores"][str(tail)]
        sums = dict(zip(_SUMS, every, strict=True))
        fisher = sums["fisher"]
        none = np.where(np.isnan(fisher), np.nan, 0.0)
        found[tail] = Curves(
            change=sums["change"] / tokens,
            error=np.sqrt(sums["squared"] / np.maximum(sums["size"], 1e-30)),
            recall=np.minimum(1.0, sums["recall"] / tokens),
            tiles=sums["tiles"],
            text=fisher / tokens if text else none,
            drop=sums["drop"] / tokens if text else none,
            answer=none if text or not known else fisher / max(1, one.answer_tokens),
            tokens=tokens if text else 0,
            texts=int(text),
            asked=int(known and not one.is_text),
        )
    return found
