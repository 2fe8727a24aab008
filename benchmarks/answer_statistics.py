"""Compare statistics of lost answers: whether they agree, and which has the narrowest interval.

    python benchmarks/answer_statistics.py smollm2 examples/smollm2.yaml --contexts 12 --out FILE

Held-out contexts of `facts` are run with dense attention and with the artifact. Each statistic is a
loss as a fraction of dense attention's value, paired by context, with Student's 95% interval over
the contexts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from result import Result, commit, labeled, machine_of, write

from artifacts import load_pair
from artifacts.files import check_writable
from profiling.environment import environment, versions
from profiling.evaluation.intervals import share_of
from profiling.models.loading import load_model
from profiling.progress import phase
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.prompt import Task
from profiling.quality.sequences import Losses, Reference, sequences
from search.gate import plans_of
from search.model.prompts import HeldOut


def values_of(losses: Losses) -> dict[str, tuple[float, float]]:
    """(loss, size) of a context by each statistic."""
    dense = np.exp(-losses.answer_dense_nll)
    own = np.exp(-losses.answer_nll)
    rise = losses.answer_nll - losses.answer_dense_nll
    likely = int((dense > 0.5).sum())
    return {
        "correct answers": (
            float(losses.dense_right.sum()) - float(losses.right.sum()),
            float(losses.dense_right.sum()),
        ),
        "correct answers, ties smoothed": (
            float((losses.dense_clear - losses.clear).sum()),
            float(losses.dense_clear.sum()),
        ),
        "probability": (float((dense - own).sum()), float(dense.sum())),
        "probability above 0.5": (likely - float((own > 0.5).sum()), float(likely)),
        "-log p, nats an answer": (float(rise.sum()), float(len(rise))),
    }


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--contexts", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    check_writable(options.out)
    artifact, arrays = load_pair(options.artifact)
    length = artifact.search.calibration.length
    loaded = load_model(options.model, dtype=options.dtype, device="cpu")
    held_out = HeldOut(
        (Task("facts"),),
        loaded,
        length=length,
        samples=1,
        seed=1,
        seen=Seen.by([arrays]),
        first=GATE_SET,
    )
    prompts = held_out.take("answer", 4)
    if options.contexts > 4:
        prompts += held_out.take("answer", options.contexts - 4)
    reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
    plans = plans_of(artifact, length)
    by_context = []
    answers = 0
    with phase("contexts", len(reference.sequences), "contexts") as shown:
        for number in range(len(reference.sequences)):
            losses = reference.losses(number, plans)
            by_context.append(values_of(losses))
            answers += len(losses.right)
            shown.update()
    rows = []
    for name in by_context[0]:
        pairs = [each[name] for each in by_context]
        interval = share_of([loss for loss, _ in pairs], [size for _, size in pairs])
        row: dict[str, Any] = {"statistic": name, "loss": round(interval.value, 5)}
        line = f"{name:<32} {interval.value:+.4f}"
        low = high = None
        if interval.is_known:
            low = round(interval.low, 5)
            high = round(interval.high, 5)
            line += f" ({low:+.4f} to {high:+.4f})"
        rows.append(row | {"low": low, "high": high})
        print(line)
    settings = {"tokens": length, "contexts": len(by_context), "answers": answers}
    result = Result(
        what="Loss of answers by statistic: fraction of dense attention's value, by context",
        command=(
            f"python benchmarks/answer_statistics.py {Path(options.model).name} "
            f"{options.artifact.name} --contexts {options.contexts} --out FILE"
        ),
        commit=commit(),
        machine=machine_of(environment("cpu")),
        versions=versions(),
        rows=labeled("settings", [settings]) + labeled("row", rows),
    )
    write(options.out, result)


if __name__ == "__main__":
    main()
