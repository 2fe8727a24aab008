"""The picture of one head for search.explain: its attention, the pattern over it, and the attention that is missed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, HeadwiseError
from artifacts.files import check_writable
from profiling.models.loading import load_model
from profiling.pictures.drawing import save, save_table
from profiling.pictures.head_pictures import missed_figure
from profiling.pictures.missed_mass import Missed, missed_mass
from profiling.prompts.prompt import Prompt, make_prompts, parse_task
from runtime.fingerprint import check
from search.explaining.question import Question

if TYPE_CHECKING:
    from artifacts.sidecar import Array


def draw_head(question: Question, artifact: Artifact, arrays: Mapping[str, Array], folder: Path) -> dict[str, Any]:
    """Measure a head on a prompt and draw it: head_L_H.png, .svg, and .csv by cells and _queries.csv by queries.

    Returns:
        `missed`, the figures with a sentence, and `files`, the paths.

    Raises:
        HeadwiseError: the model is not the artifact's, the prompt cannot be made, or the files not be written.
    """
    search = artifact.search
    assert search is not None and question.model and question.layer is not None and question.head is not None
    stem = folder / f"head_{question.layer}_{question.head}"
    tables = [stem.with_name(f"{stem.name}{end}") for end in (".png", ".svg", ".csv", "_queries.csv")]
    for path in tables:
        check_writable(path)
    task, length = _task(question.task, artifact), question.length or max(search.calibration.lengths)
    loaded = load_model(question.model, dtype=question.dtype or search.dtype, device=question.device)
    check(artifact.model, loaded.model)
    if length > artifact.model.max_positions:
        raise HeadwiseError(f"--length {length} is more than the {artifact.model.max_positions} positions of the model")
    prompt = make_prompts(task, loaded.tokenizer, length=length, samples=1, seed=search.seed)[0]
    missed = missed_mass(loaded.model, artifact, arrays, prompt, question.layer, question.head)
    name = parse_task(task).name
    caption = (
        f"{artifact.model.name}, {question.dtype or search.dtype} on {question.device}; prompt: {name}, "
        f"{length} tokens, seed {search.seed}; artifact: {question.file.name} ({artifact.content_sha256[:8]})\n"
        f"drawn: {question.command}"
    )
    files = save(missed_figure(missed.drawn, missed.cells, missed.by_query, caption), stem)
    files += [_cells(stem, missed), _queries(stem, missed)]
    return {"missed": _figures(missed, prompt, name), "files": [str(path) for path in files]}


def _task(asked: str | None, artifact: Artifact) -> str:
    """The first task of the search, unless another is asked for: of a task with a file only its name was kept."""
    if asked is not None:
        return asked
    assert artifact.search is not None
    task = artifact.search.calibration.tasks[0]
    if ":" in task:
        raise HeadwiseError(f"the search looked at {task}, whose file is not in the artifact: give it by --task")
    return task


def _figures(missed: Missed, prompt: Prompt, task: str) -> dict[str, Any]:
    drawn, length = missed.drawn, len(prompt.input_ids)
    assert drawn.recall is not None and drawn.density is not None
    query, key = int(missed.by_query.argmax()), int(missed.by_key.argmax())
    most = {"query": query, "share": float(missed.by_query[query]), "key": key, "of_key": float(missed.by_key[key])}
    share = float(missed.by_query.mean())
    sentence = (
        f"On {task}, {length:,} tokens, {drawn.pattern} computes {drawn.density:.4f} of the tiles and misses "
        f"{share:.4f} of the attention: most of query {query:,} ({most['share']:.4f}), and most on key {key:,} "
        f"({most['of_key'] / max(share * length, 1e-30):.4f} of all that is missed)."
    )
    kept = {"density": drawn.density, "recall": drawn.recall}
    return {"task": task, "length": length, **kept, **most, "sentence": sentence}


def _cells(stem: Path, missed: Missed) -> Path:
    drawn = missed.drawn
    assert drawn.computed is not None
    computed = drawn.computed

    def lines() -> Iterator[list[object]]:
        for y, x in zip(*np.tril_indices(len(missed.cells)), strict=True):
            values = (drawn.attention[y, x], computed[y, x], missed.cells[y, x])
            yield [int(y) * drawn.cell, int(x) * drawn.cell, *(f"{value:.6g}" for value in values)]

    return save_table(stem, ["query", "key", "attention", "computed", "missed"], lines())


def _queries(stem: Path, missed: Missed) -> Path:
    pairs = zip(missed.by_query, missed.by_key, strict=True)
    lines = ([at, f"{query:.6g}", f"{key:.6g}"] for at, (query, key) in enumerate(pairs))
    header = ["position", "missed by this query", "missed on this key"]
    return save_table(stem.with_name(f"{stem.name}_queries"), header, lines)
