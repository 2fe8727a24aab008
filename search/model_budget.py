"""The search with one budget for the whole model: curves of every head, spent where they save most, proven end to end.

1. Curves: each calibration prompt is one dense pass on which every head tries every candidate (search.curves).
2. Allocation: for a budget the exact best by the curves (search.allocate), in seconds of this machine or FLOPs.
3. Refinement: Optuna weighs groups of layers by what the whole model says (search.refine); a front of cost and KL.
4. Gate: held-out prompts; where they lose more than allowed, the heads that they show to be worst get more.

1, 3 and 4 are shared by all processes of a search through one Optuna storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from artifacts import Artifact, HeadwiseError, ModelInfo
from artifacts.files import check_writable
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import held_out
from profiling.prompts.prompt import Prompt, make_prompts, parse_task
from profiling.quality.logits import check_logits
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, sliding_layers
from search.costs import Unit, costs_by, given_costs, shared_table
from search.gate import DEFAULT_TASKS, Limits
from search.ladder import ladder
from search.model_phases import STUDIES, Phases
from search.serving import serving_backend
from search.storage import open_storage
from search.study import discard
from search.workers import workers

DENSE_TAIL = 64
DEFAULT_BUDGET = 0.25
DEFAULT_TRIALS = 24
# What a length at most is where none is asked for: beyond it a search takes long, and sizes go with the length.
_LONGEST = 8192


@dataclass(frozen=True, kw_only=True)
class ModelSearch:
    """What a search with one budget for the model is asked to do; None takes the default that depends on the model.

    budget: cost of all heads' attention, as a share of what computing everything by the same kernels costs.
    lengths: prompts are made at each; the patterns are for the longest, the others tell how sizes go with the length.
    """

    model: str
    out: Path
    tasks: tuple[str, ...] = DEFAULT_TASKS
    lengths: tuple[int, ...] | None = None
    samples: int = 1
    budget: float = DEFAULT_BUDGET
    cost: Unit = "seconds"
    cost_table: Path | None = None
    n_trials: int = DEFAULT_TRIALS
    timeout: float | None = None
    storage: str | None = None
    workers: int = 1
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    backend: str = "auto"
    revision: str | None = None
    dense_below: int | None = None
    dense_tail: int = DENSE_TAIL
    beyond_positions: bool = False
    fresh: bool = False
    picture: bool = True
    command: str = ""
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("samples", "n_trials", "workers", "dense_below"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise HeadwiseError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.lengths is not None and min(self.lengths) < 2 * DENSE_TAIL:
            raise HeadwiseError(f"--length must be at least {2 * DENSE_TAIL}, got {min(self.lengths)}")
        if not 0 < self.budget <= 1:
            raise HeadwiseError(f"--budget must be above 0 and at most 1 (all of attention), got {self.budget:g}")
        if self.dense_tail < 0:
            raise HeadwiseError(f"--dense-tail must be at least 0, got {self.dense_tail}")
        if self.timeout is not None and not self.timeout > 0:
            raise HeadwiseError(f"--timeout must be above 0 seconds, got {self.timeout:g}")


def run(config: ModelSearch) -> Artifact | None:
    """Search, and write `config.out` with its sidecar; None in a process that another one started to help it.

    Raises:
        HeadwiseError: anything the user has to put right, or the gate, that nothing passes; no file is written then.
    """
    check_writable(config.out)
    for task in config.tasks:
        parse_task(task)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, revision=config.revision)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    return search_model(config, loaded, model)


def search_model(config: ModelSearch, loaded: LoadedModel, model: ModelInfo) -> Artifact | None:
    """The search on a model that is loaded and fingerprinted."""
    check_logits(loaded.model)
    modules = attention_layers(loaded.model)
    if not set(modules) - sliding_layers(modules):
        raise HeadwiseError(f"every layer of {model.name} slides over a window already: nothing to search")
    lengths = _lengths(config, model)
    prompts = _calibration(config, loaded, lengths)
    apart = held_out(
        config.tasks,
        loaded.tokenizer,
        length=lengths[-1],
        samples=config.samples,
        seed=config.seed,
        seen=list(prompts.values()),
    )
    backend = serving_backend(config.backend, model, config.dtype, config.device)
    costs = given_costs(config.cost, model, length=lengths[-1], dtype=config.dtype, table=config.cost_table)
    # All that the user can have got wrong is known: from here on there is a file.
    storage, stem = open_storage(config.storage, config.out), config.out.stem
    if config.fresh:
        # Before the copies start: they would work on what is discarded.
        discard(storage, [f"{stem}.{name}" for name in STUDIES])
    if costs is None:
        table = shared_table(storage, f"{stem}.table", model, lengths=lengths, dtype=config.dtype, device=config.device)
        costs = costs_by(table, model, length=lengths[-1], dtype=config.dtype)
    phases = Phases(
        config=config,
        loaded=loaded,
        model=model,
        prompts=prompts,
        held_out=apart,
        candidates={length: ladder(length) for length in lengths},
        costs=costs,
        backend=backend,
        storage=storage,
    )
    with workers(config.workers, "search.heads", config.argv):
        outcome = phases.run()
    return None if outcome is None else phases.write(outcome)


def _lengths(config: ModelSearch, model: ModelInfo) -> tuple[int, ...]:
    """Ascending, each once."""
    lengths = tuple(sorted(set(config.lengths or (min(_LONGEST, model.max_positions),))))
    if lengths[-1] > model.max_positions and not config.beyond_positions:
        raise HeadwiseError(
            f"--length {lengths[-1]} is more than the {model.max_positions} positions of {model.name}; "
            "choose a shorter one, or pass --beyond-positions to go past what the model was trained on"
        )
    return lengths


def _calibration(config: ModelSearch, loaded: LoadedModel, lengths: Sequence[int]) -> dict[str, Prompt]:
    """All calibration prompts by `length/task/number`."""
    found: dict[str, Prompt] = {}
    for length in lengths:
        for task in dict.fromkeys(config.tasks):
            made = make_prompts(task, loaded.tokenizer, length=length, samples=config.samples, seed=config.seed)
            name = parse_task(task).name
            if f"{length}/{name}/0" in found:
                raise HeadwiseError(f"--calibration has two tasks {name}: give their files different names")
            found |= {f"{length}/{name}/{i}": prompt for i, prompt in enumerate(made)}
    return found
