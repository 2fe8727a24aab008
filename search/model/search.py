"""The search with one budget for the whole model, phase by phase.

Prompts, curves, costs, allocation, refinement, gate, timing, record: `search_model` calls them in
this order, and docs/internals.md describes them. Ranks of torchrun share curves, refinement and
gate. Finished work is kept in the resume file next to the output."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import chain
from typing import Any

from artifacts import ModelInfo
from artifacts.files import check_writable
from kernels.patterns import Pattern
from profiling.ledger import Ledger
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt, digest, parse_task
from profiling.quality.sequences import check_logits
from profiling.ranks import Ranks, ranks
from runtime.fingerprint import fingerprint
from search.model.acceptance import gate
from search.model.allocation import Heads, spendable
from search.model.candidates import candidate_grid
from search.model.config import ModelSearch
from search.model.costs import Costs
from search.model.layers import searched_layers, serving_backend
from search.model.prompts import calibration_prompts, held_out_sets, length_of
from search.model.record import Outcome, Recorded, build, write
from search.model.refine import refine
from search.model.scored_prompts import score_prompts
from search.model.search_run import SearchRun, study_of
from search.model.speed import time_attention, time_first_token
from search.model.timed_costs import time_candidates
from search.study import check_storage

# Raised where the resume file would keep another value under the same name.
_VERSION = 7


def run(config: ModelSearch, loaded: LoadedModel | None = None) -> Recorded | None:
    """Search, and write `config.out`; None in ranks after the first.

    Args:
        config: of the search.
        loaded: the model; None loads the one that the config names.

    Raises:
        HeadwiseError: a user's mistake, or a gate that nothing passes; no file is written.
    """
    # Missing packages are reported before any work.
    if config.storage is not None:
        import_module("optuna")
    if config.picture:
        import_module("matplotlib")
    check_writable(config.out)
    with ranks() as joined:
        if loaded is None:
            config = settled(config, quiet=not joined.is_first)
            with joined.main_process_first():
                loaded = load_model(
                    config.model,
                    dtype=config.dtype,
                    device=joined.device(config.device),
                    revision=config.revision,
                    max_memory=config.max_memory,
                )
        model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
        return search_model(config, loaded, model, joined)


def search_model(
    config: ModelSearch, loaded: LoadedModel, model: ModelInfo, joined: Ranks | None = None
) -> Recorded | None:
    """Search a model that is loaded and fingerprinted; None in ranks after the first."""
    began = time.monotonic()
    config = settled(config, loaded.model)
    check_logits(loaded.model)
    layers = searched_layers(loaded)
    joined = joined or Ranks()

    # Prompts. The first held-out set is made before any work, to refuse a text that is too short.
    length = length_of(config, model)
    prompts = calibration_prompts(config, loaded, length)
    seen = Seen(prompts)
    held_out = held_out_sets(config, loaded, length, seen)
    held_out = chain([next(held_out)], held_out)

    backend = serving_backend(
        config.backend, model, config.dtype, config.device, quiet=not joined.is_first
    )
    if joined.is_first:
        check_storage(config.storage)
    candidates = candidate_grid(length)
    settings = _settings(config, model, length, prompts, backend, candidates)
    with Ledger(config.out, "heads", settings=settings, fresh=config.fresh, ranks=joined) as ledger:
        search_run = SearchRun(
            loaded=loaded,
            model=model,
            length=length,
            prompts=prompts,
            candidates=candidates,
            layers=layers,
            tails=config.tails,
            dtype=config.dtype,
            device=config.device,
            backend=backend,
            seen=seen,
            ranks=joined,
            ledger=ledger,
            began=began,
        )

        # Curves: each prompt is one dense pass forward and back, on which heads try candidates.
        # Scoring leaves dense attention's predictions in the reference.
        calibration = search_run.reference(prompts)
        curves, gradient_fault = score_prompts(search_run, calibration)
        if gradient_fault and joined.is_first:
            _report_fault(gradient_fault)

        # Costs: counted, or timed on the layers of a real prompt.
        if config.cost == "flops":
            costs = Costs.flops(model, length=length, dtype=search_run.dtype)
        else:
            costs = time_candidates(search_run, calibration.sequences[0], curves, config.share)

        # Allocation: the budget, spent over the heads.
        heads = Heads.of(curves, costs, candidates)
        total, reason = spendable(
            heads, config.share, is_explicit=config.budget is not None, length=length
        )

        study = study_of(
            calibration,
            list(curves),
            config.storage if joined.is_first else None,
            config.out.stem,
        )

        # Refinement: text and answers are balanced by a run on the calibration prompts.
        allocation = refine(search_run, heads, total, calibration, study)

        # Gate: losses on held-out prompts, and more budget where a task loses too much.
        accepted = gate(search_run, heads, config.limits, total, allocation, held_out, study)
        if not joined.is_first:
            return None
        outcome = Outcome(
            run=search_run,
            curves=curves,
            costs=costs,
            heads=heads,
            least_reason=reason,
            accepted=accepted,
            calibration=calibration.sequences,
            gradient_fault=gradient_fault,
        )

        # Timing: attention alone, then whole prefills of the artifact by the runtime.
        speed = None
        if config.cost == "seconds":
            speed = time_attention(search_run, accepted)
        artifact, arrays = build(config, outcome, speed)
        if speed is not None and config.max_memory is None:
            first_token = time_first_token(search_run, accepted, artifact, speed)
            speed = replace(speed, first_token=first_token)

        # Record.
        recorded = write(config, outcome, artifact, arrays, speed)
        ledger.remove()
    return recorded


def _settings(
    config: ModelSearch,
    model: ModelInfo,
    length: int,
    prompts: list[Prompt],
    backend: str,
    candidates: tuple[Pattern, ...],
) -> dict[str, Any]:
    """Settings that every unit of the resume file depends on.

    Files are in it by name and contents, for paths differ between machines."""
    grid = repr(candidates).encode()
    return {
        "version": _VERSION,
        "model": model.name,
        "weights": model.weights_sha256,
        "tasks": list(dict.fromkeys(parse_task(task).name for task in config.tasks)),
        "length": length,
        "prompts": digest(prompts),
        "dtype": config.dtype,
        "device": config.device.partition(":")[0],
        "backend": backend,
        "dense tails": list(config.tails),
        "candidates": hashlib.sha256(grid).hexdigest()[:16],
    }


def _report_fault(fault: str) -> None:
    """Print why gradients are missing."""
    print(
        f"no gradients ({fault}): heads are weighed by their change of the residual stream",
        file=sys.stderr,
    )
