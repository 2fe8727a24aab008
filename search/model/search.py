"""The search with one budget for the whole model, phase by phase.

Prompts, curves, costs, allocation, refinement, gate, timing, record: `search_model` calls them in
this order, and docs/internals.md describes them. Ranks of torchrun share curves, refinement and
gate. Finished work is kept in the resume file next to the output.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

from artifacts import ModelInfo
from artifacts.files import check_writable
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import Seen
from profiling.quality.sequences import check_logits
from profiling.ranks import Ranks, ranks
from runtime.fingerprint import fingerprint
from search.model.acceptance import gate
from search.model.allocation import CostCurves, spendable
from search.model.candidates import candidate_grid
from search.model.config import ModelSearch
from search.model.costs import Costs
from search.model.prompts import (
    HeldOut,
    announce_fewer,
    calibration_prompts,
    length_of,
)
from search.model.record import build, write
from search.model.refine import refine
from search.model.run import SearchRun
from search.model.scored_prompts import score_prompts
from search.model.speed import time_attention, time_prefills
from search.model.start import check_backend, start_run
from search.model.timed_costs import time_candidates
from search.study import check_storage, study_name


def run(config: ModelSearch, loaded: LoadedModel | None = None) -> SearchRun | None:
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
    check_backend(config.backend)
    with ranks() as joined:
        if joined.is_first:
            check_storage(config.storage)
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
) -> SearchRun | None:
    """Search a model that is loaded and fingerprinted; None in ranks after the first."""
    began = time.monotonic()
    config = settled(config, loaded.model)
    check_logits(loaded.model)
    joined = joined or Ranks()

    # Prompts. The first held-out ones are made before any work, to refuse a text that is too short.
    length = length_of(config, model)
    prompts = calibration_prompts(config, loaded, length)
    seen = Seen(prompts)
    held_out = HeldOut(
        config.held_out_tasks,
        loaded,
        length=length,
        samples=config.samples,
        seed=config.seed,
        seen=seen,
    )

    if joined.is_first:
        announce_fewer(config.tasks, prompts, length=length, samples=config.samples)
        held_out.announce()
    started = start_run(
        config,
        loaded,
        model,
        prompts,
        candidate_grid(length),
        length=length,
        tails=config.tails,
        seen=seen,
        ranks=joined,
        began=began,
        tasks=list(dict.fromkeys(task.name for task in config.tasks)),
    )
    with started as record:
        # Curves: each prompt is one dense pass forward and back, on which heads try candidates.
        # Scoring leaves dense attention's predictions in the reference.
        reference = record.reference(prompts)
        record.calibration = reference.sequences
        curves, record.gradient_fault = score_prompts(record, reference)
        if record.gradient_fault and joined.is_first:
            _report_fault(record.gradient_fault)

        # Costs: counted, or timed on the layers of a real prompt.
        if config.cost == "flops":
            record.costs = Costs.flops(model, length=length, dtype=config.dtype)
        else:
            record.costs = time_candidates(record, record.calibration[0], curves)

        # Allocation: a budget, spent over the heads. Where none was asked for the limits choose it.
        record.heads = CostCurves.from_curves(curves, record.costs, record.candidates)
        budget = None
        if config.share is not None:
            budget = spendable(record.heads, config.share, length=length)
        storage = config.storage if joined.is_first else None
        record.start_study(storage, study_name("search", config.out), held_out.first)

        # Refinement: text and answers are balanced by a run on the calibration prompts.
        record.allocation = refine(record, reference, limits=config.limits, budget=budget)

        # Gate: losses on held-out prompts, and more budget until they are proven.
        gate(record, config.limits, held_out, fixed=budget is not None)
        if not joined.is_first:
            return None

        # Timing: attention alone, then whole prefills of the artifact by the runtime.
        if config.cost == "seconds":
            record.attention = time_attention(record)
        artifact, arrays = build(config, record)
        if config.cost == "seconds" and config.max_memory is None:
            record.prefills = time_prefills(record, artifact)

        # Record.
        write(config, record, artifact, arrays)
        record.ledger.remove()
    return record


def _report_fault(fault: str) -> None:
    """Print why gradients are missing."""
    print(
        f"no gradients ({fault}): heads are weighed by their change of the residual stream",
        file=sys.stderr,
    )
