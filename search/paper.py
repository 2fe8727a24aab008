"""MInference 1.0, Algorithm 1: kernel-aware sparse pattern search, a budget for each head.

Another allocation of a search's run: every candidate is brought to the same computed tiles on one
prompt, run through the kernels that will serve, and the one nearest to dense attention's output
wins.

Shapes: L layers, H query heads, G KV heads, S prompt length, D head dim, C candidates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from artifacts import Artifact, HeadwiseError, Prefill, Summary, pattern_name
from artifacts.cli.command import one_process
from artifacts.files import check_writable
from kernels.index import TILE, num_tiles, with_dense_tail
from kernels.patterns import NOT_SIZES, Builder, LayerPlan, Pattern, make
from profiling.finite import check_finite
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import dense_of_layer, index_fidelity
from profiling.models.device import settled
from profiling.models.loading import load_model
from profiling.progress import phase
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import make_prompts
from profiling.ranks import Ranks
from runtime.devices import execution_device
from runtime.fingerprint import fingerprint
from search.model.allocation import Allocation
from search.model.config import PAPER_BUDGET, PAPER_LENGTH, ModelSearch
from search.model.costs import Costs, causal_tiles
from search.model.prompts import check_positions
from search.model.record import save_record, search_info
from search.model.rows import as_artifact_pattern, score_arrays, winners
from search.model.run import SearchRun
from search.model.scoring import estimate_of, prepare_all
from search.model.start import check_backend, start_run

SPACE: tuple[Pattern, ...] = (
    make("a_shape", sink=1024, window=4096),
    make("vertical_slash", vertical=30, slash=2048),
    make("vertical_slash", vertical=100, slash=1800),
    make("vertical_slash", vertical=500, slash=1500),
    make("vertical_slash", vertical=3000, slash=200),
    make("block_sparse", blocks=100),
)
"""Where ChangeSpace starts."""
_STEP = 50
_MEASURES = ("error", "recall", "density")
Scores = Mapping[str, np.ndarray]
"""(H, C) each of a layer: error, recall and density as in profiling.inside.head_fidelity; steps:
from the candidate's start; within: whether it keeps to the budget."""


def run(config: ModelSearch) -> SearchRun:
    """Search, and write `config.out` with its sidecar; a killed run resumes.

    Args:
        config: with the preset; None takes the paper's defaults.

    Raises:
        HeadwiseError: a user's mistake; no file is written then.
    """
    one_process("headwise search --preset paper")
    began = time.monotonic()
    config = settled(config)
    check_writable(config.out)
    check_backend(config.backend)
    (task,) = config.paper_tasks
    length = config.length or PAPER_LENGTH
    config.check_tail(length)
    tail = config.dense_tail or 0
    target = target_tiles(_budget(config), length, tail)
    loaded = load_model(
        config.model, dtype=config.dtype, device=config.device, revision=config.revision
    )
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    if not config.beyond_positions:
        check_positions(length, model)
    prompts = make_prompts(task, loaded.tokenizer, length=length, samples=1, seed=config.seed)
    started = start_run(
        config,
        loaded,
        model,
        prompts,
        SPACE,
        length=length,
        tails=(tail,),
        seen=Seen(prompts),
        ranks=Ranks(),
        began=began,
        **{"target tiles": target},
    )
    with started as record:
        scores = score_layers(record, target)
        record.costs = Costs.flops(model, length=length, dtype=config.dtype)
        record.allocation, grid = allocate(record, scores)
        _write(config, record, scores, grid)
        record.ledger.remove()
    return record


def _budget(config: ModelSearch) -> str:
    """The budget of each head as text."""
    if config.budget is None:
        return PAPER_BUDGET
    return str(config.budget)


def score_layers(run: SearchRun, target: int) -> dict[int, Scores]:
    """The scores of each layer, on one dense pass over the prompt.

    Args:
        run: the search.
        target: tiles that a head may compute.
    """
    units = {layer: run.ledger.unit("scores", {"layer": layer}) for layer in run.layers}
    left = [layer for layer, unit in units.items() if unit not in run.ledger]
    with phase("scoring candidates", len(run.layers), "layers") as shown:
        shown.skip(len(run.layers) - len(left))

        def visit(inputs: LayerInputs) -> None:
            if inputs.layer in left:
                scores = score(inputs, target=target, dense_tail=run.tails[0], backend=run.backend)
                for head, errors in enumerate(scores["error"]):
                    what = f"errors of head {inputs.layer}.{head} are"
                    check_finite(errors, what, run.loaded.model)
                run.ledger.put(units[inputs.layer], scores)
                shown.update()

        if left:
            ids = torch.tensor([run.prompts[0].input_ids], dtype=torch.long, device="cpu")
            capture(run.loaded.model, ids.to(execution_device(run.loaded.model)), visit)
    return {layer: run.ledger.get(unit) for layer, unit in units.items()}


def score(inputs: LayerInputs, *, target: int, dense_tail: int, backend: str) -> Scores:
    """The scores of all heads and candidates of a layer, q (1, H, S, D), k (1, G, S, D) and v.

    Args:
        inputs: of the layer.
        target: tiles that a head may compute, with the last `dense_tail` queries that see every
            key.
        dense_tail: last queries that see every key.
        backend: as for kernels.attention.sparse_attention.
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


def allocate(
    run: SearchRun, scores: Mapping[int, Scores]
) -> tuple[Allocation, tuple[Pattern, ...]]:
    """The winner of every head, and the patterns that its candidates are indices of."""
    grid: dict[Pattern, int] = {}
    candidates = np.full((run.model.num_layers, run.model.num_heads), -1)
    density = 0.0
    for layer, of_layer in scores.items():
        for head, c in enumerate(choose(of_layer, layer)):
            winner = moved(SPACE[c], of_layer["steps"][head, c])
            candidates[layer, head] = grid.setdefault(winner, len(grid))
            density += float(of_layer["density"][head, c])
    cost = density * run.costs.all_keys()
    allocation = Allocation(
        candidates=candidates,
        tail=run.tails[0],
        # Each head has a budget of its own here.
        budget=cost,
        cost=cost,
        price=0.0,
        prompt_weights={},
    )
    return allocation, tuple(grid)


def _write(
    config: ModelSearch,
    run: SearchRun,
    scores: Mapping[int, Scores],
    grid: Sequence[Pattern],
) -> None:
    """Write the artifact with its sidecar.

    Args:
        config: of the search.
        run: with its allocation.
        scores: by layer.
        grid: patterns of the allocation's candidates.
    """
    shape = run.allocation.candidates.shape
    choice = np.full(shape, -1)
    measures = {name: np.full((*shape, len(SPACE)), np.nan) for name in _MEASURES}
    grown = [{name: np.zeros(shape, dtype=int) for name in sizes(start)} for start in SPACE]
    for layer, of_layer in scores.items():
        choice[layer] = choose(of_layer, layer)
        for name in _MEASURES:
            measures[name][layer] = of_layer[name]
        for (head, c), steps in np.ndenumerate(of_layer["steps"]):
            for name, size in sizes(moved(SPACE[c], steps)).items():
                grown[c][name][layer, head] = size
    arrays = score_arrays(
        choice, [pattern_name(as_artifact_pattern(start)) for start in SPACE], measures, grown
    )
    rows, patterns = run.allocation.rows(grid)
    search = search_info(
        run,
        command=config.command,
        tasks=(config.paper_tasks[0].name,),
        samples=1,
        preset="paper",
        seed=config.seed,
        budget=_budget(config),
        spent=float(np.nanmean(arrays["chosen.density"])),
        summary=Summary(
            **{name: float(np.nanmean(arrays[f"chosen.{name}"])) for name in _MEASURES},
            winners=winners(rows, patterns),
        ),
    )
    # Sizes are token counts: at half the length they cover about twice the fraction, and there
    # sparsity stops paying.
    dense_below = config.dense_below
    if dense_below is None:
        dense_below = run.length // 2
    prefill = Prefill(dense_below=dense_below, dense_tail=run.tails[0], layers=rows)
    artifact = Artifact(model=run.model, search=search, patterns=patterns, prefill=prefill)
    save_record(run, config.out, artifact, arrays, picture=config.picture)


def sizes(pattern: Pattern) -> dict[str, int]:
    """The sizes that ChangeSpace moves, by name."""
    return {name: size for name, size in vars(pattern).items() if name not in NOT_SIZES}


def moved(start: Pattern, steps: int) -> Pattern:
    """The pattern `steps` from its start: the largest size moves, the others in proportion."""
    own = sizes(start)
    largest = max(own.values())
    target = largest + steps * _step(start)
    return replace(
        start, **{name: max(1, round(size * target / largest)) for name, size in own.items()}
    )


def bounds(start: Pattern, length: int) -> tuple[int, int]:
    """The fewest steps with positive sizes, and the most that still matter at `length` tokens."""
    largest = max(sizes(start).values())
    step = _step(start)
    if start.kind == "block_sparse":
        largest_step = num_tiles(length)
    else:
        largest_step = length
    return -((largest - 1) // step), max(0, -(-(largest_step - largest) // step))


def _step(start: Pattern) -> int:
    # 50 tokens are less than a block, and a block is the least that block-sparse can change by.
    if start.kind == "block_sparse":
        return 1
    return _STEP


def change_space(
    start: Pattern, target: int, build: Builder, *, num_heads: int, length: int, dense_tail: int
) -> list[int]:
    """ChangeSpace: steps to each head's largest pattern of at most `target` tiles.

    Tiles are counted from the index on the layer's own q and k: a head whose diagonals lie
    scattered gets fewer of them than one whose diagonals share tiles. A head whose smallest pattern
    computes more gets that one.
    """
    lowest, highest = bounds(start, length)
    low = [lowest] * num_heads
    high = [highest] * num_heads
    while low != high:
        middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
        index = with_dense_tail(build([moved(start, steps) for steps in middle]), dense_tail)
        for head, tiles in enumerate(index.computed_tiles()[0].tolist()):
            if low[head] == high[head]:
                continue
            if tiles <= target:
                low[head] = middle[head]
            else:
                high[head] = middle[head] - 1
    return low


def target_tiles(budget: str, length: int, dense_tail: int) -> int:
    """Tiles a head may compute at `length` tokens, those of the last `dense_tail` queries included.

    Args:
        budget: "a_shape:SINK,WINDOW" for what that pattern computes, or a fraction of dense causal
            attention.
        length: tokens of the prompt.
        dense_tail: last queries that see every key.

    Raises:
        HeadwiseError: a budget that cannot be read, is more than dense, or is less than any pattern
            needs.
    """
    dense = causal_tiles(length)
    smallest = _a_shape_tiles((1, 1), length, dense_tail)
    if budget.startswith("a_shape:"):
        words = budget.removeprefix("a_shape:").split(",")
        if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise HeadwiseError(
                f"budget {budget!r} must be a_shape:SINK,WINDOW with two positive token counts"
            )
        target = _a_shape_tiles([int(word) for word in words], length, dense_tail)
    else:
        try:
            fraction = float(budget)
        except ValueError:
            raise HeadwiseError(
                f"budget {budget!r} must be a fraction such as 0.25 or a_shape:SINK,WINDOW"
            ) from None
        if not 0 < fraction <= 1:
            raise HeadwiseError(
                f"budget {budget} must be a fraction of dense attention, above 0 and at most 1"
            )
        target = int(fraction * dense)
    if target < smallest:
        raise HeadwiseError(
            f"budget {budget} is impossible at {length} tokens: the smallest pattern (first and "
            f"last tile of {TILE} keys, {dense_tail} queries dense) computes "
            f"{smallest / dense:.3f} of dense attention; ask for more, or for a longer --length"
        )
    return target


def _a_shape_tiles(sizes: Sequence[int], length: int, dense_tail: int) -> int:
    # An A-shape reads the shapes of q and k alone.
    tensor = torch.empty(1, dtype=torch.float32, device="cpu").expand(1, 1, length, 1)
    plan = LayerPlan([make("a_shape", sink=sizes[0], window=sizes[1])], 1, dense_tail=dense_tail)
    return int(plan.build(tensor, tensor).computed_tiles())
