"""Accuracy and speed of Headwise, dense attention and OpenVINO GenAI, on the same prompts.

    pip install 'openvino-genai>=2026.4'
    python benchmarks/openvino.py cfg.yaml --model smollm2 --length 8192 --out FILE.json

OpenVINO GenAI serves the model densely and with XAttention, its sparse prefill. An answer is right
if each of its tokens has p > 0.5, given the right ones before it: one rule for all methods. Prompts
are held out: no search has seen them. Seconds to the first token are of the same prompts, methods
interleaved. The file is saved after each measurement; the same command resumes it, and further
tasks, contexts, thresholds, points and artifacts are added to it. A prompt that a method is added
to is timed again by all.

openvino_engines.py serves a prompt, openvino_export.py makes the graph that OpenVINO serves, and
openvino_record.py the file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from openvino_engines import Graphs, OpenVINOEngine, Request, TorchEngine, request_of
from openvino_export import exported, mark
from openvino_record import DENSE, OPENVINO, XATTENTION, Record, table
from result import commit

from artifacts import Artifact, HeadwiseError, load_pair
from artifacts.cli.command import run_command
from profiling.environment import environment, versions
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import announce, phase
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.prompt import parse_task
from profiling.quality.sequences import sequences
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense
from runtime import LoadedArtifact
from runtime import load as load_headwise
from runtime.fingerprint import check
from search.model.prompts import HeldOut, check_positions
from search.model.transfer import info_of

# Contexts of each task that are made at a time: those of a longer run begin with those of a
# shorter one.
_BATCH = 4


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("config", type=Path, metavar="ARTIFACT")
    p.add_argument("--model", required=True, help="none with sliding-window layers")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="the result, as JSON")
    p.add_argument("--length", type=int, default=8192, help="tokens of a prompt (default 8192)")
    tasks = ["facts", "label_map", "chain", "line_asked"]
    p.add_argument(
        "--tasks", nargs="+", default=tasks, help=f"what is asked (default {' '.join(tasks)})"
    )
    p.add_argument("--contexts", type=int, default=8, help="prompts of each task (default 8)")
    p.add_argument(
        "--timed",
        type=int,
        default=2,
        metavar="N",
        help="prompts of each task that are timed; 0: none (default 2)",
    )
    p.add_argument(
        "--thresholds",
        nargs="+",
        type=float,
        default=[0.9],
        help="XAttention's: fraction of the scores kept (default 0.9)",
    )
    p.add_argument("--block", type=int, default=64, help="XAttention's, in tokens (default 64)")
    p.add_argument(
        "--stride", type=int, default=8, help="XAttention's, of its estimate (default 8)"
    )
    p.add_argument(
        "--points",
        nargs="+",
        default=(),
        metavar="POINT",
        help="further points of the artifact, such as lost=0.01",
    )
    p.add_argument(
        "--beside",
        nargs="+",
        default=(),
        metavar="NAME=PATH",
        help="further artifacts of the model",
    )
    p.add_argument(
        "--without",
        nargs="+",
        default=(),
        metavar="METHOD",
        help=f"not run, such as {' '.join(DENSE)} {XATTENTION}_0.9",
    )
    p.add_argument("--threads", type=int, help="of all methods (default: torch's)")
    p.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    p.add_argument(
        "--dtype",
        default="bfloat16",
        help="(default bfloat16, where OpenVINO keeps its own defaults)",
    )
    return p


_Methods = Mapping[str, Callable[[Graphs], TorchEngine | OpenVINOEngine]]


def run(options: argparse.Namespace) -> Record:
    """Measure what the file does not have.

    Raises:
        HeadwiseError: a mistake of the user, or the engines' dense attentions do not agree.
    """
    if find_spec("openvino_genai") is None:
        raise HeadwiseError("OpenVINO GenAI is not there: pip install 'openvino-genai>=2026.4'")
    served, about, arrays = _artifacts(options)
    names = [*DENSE, *served, *(f"{XATTENTION}_{each:g}" for each in options.thresholds)]
    _check(options, names)
    artifact = served[HEADWISE].artifact
    weights = artifact.model.weights_sha256
    if weights is None:
        raise HeadwiseError(
            f"{options.config} does not say which weights it is for: search it again"
        )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    record = Record(options.out, _header(options, weights), about)
    loaded = load_model(options.model, dtype=options.dtype)
    for each in served.values():
        check(each.artifact.model, loaded.model)
    requests = _requests(options, loaded, Seen.by(arrays))
    for request in requests:
        record.add(
            request.digest,
            {
                "task": request.task,
                "tokens": len(request.ids),
                "answers": len(request.answers),
            },
        )
    folder = exported(options.model, weights=weights)
    methods = _methods(options, loaded.model, served)
    ids = sorted({token for each in requests for token in each.ids})
    numbers = {token: number for number, token in enumerate(ids)}
    timed = [
        request
        for task in dict.fromkeys(each.task for each in requests)
        for request in [each for each in requests if each.task == task][: options.timed]
    ]
    with tempfile.TemporaryDirectory(prefix="headwise-openvino-") as scratch:
        mark(folder, ids, Path(scratch))
        graphs = Graphs(plain=folder, marked=Path(scratch), numbers=numbers)
        _measure_accuracy(record, methods, requests, graphs)
        _measure_seconds(record, methods, timed, graphs)
    return record


def _check(options: argparse.Namespace, names: list[str]) -> None:
    """Raise HeadwiseError for options that cannot be served."""
    for name, least in (("contexts", 1), ("timed", 0), ("block", 1), ("stride", 1)):
        if (value := getattr(options, name)) < least:
            raise HeadwiseError(f"--{name} must be at least {least}, got {value}")
    for threshold in options.thresholds:
        if not 0 < threshold <= 1:
            raise HeadwiseError(f"--thresholds must be in (0, 1], got {threshold:g}")
    for name in options.without:
        if name not in names:
            raise HeadwiseError(f"--without must be of {', '.join(names)}, got {name}")
    if len(set(names)) < len(names):
        raise HeadwiseError(f"each method needs another name, got {', '.join(names)}")


def _artifacts(
    options: argparse.Namespace,
) -> tuple[dict[str, LoadedArtifact], dict[str, dict[str, Any]], list[Any]]:
    """The artifacts by method, what the file says of each, and their sidecars."""
    paths = {HEADWISE: options.config}
    points: dict[str, str | None] = {HEADWISE: None}
    for point in options.points:
        paths[f"{HEADWISE}@{point}"] = options.config
        points[f"{HEADWISE}@{point}"] = point
    for each in options.beside:
        name, equals, path = each.partition("=")
        if not equals or not name or not path or name in paths:
            raise HeadwiseError(f"--beside must be NAME=PATH, each another name, got {each}")
        paths[name] = Path(path)
    served = {name: load_headwise(path, point=points.get(name)) for name, path in paths.items()}
    about = {}
    for name, loaded in served.items():
        below = loaded.artifact.prefill.dense_below
        if options.length < below:
            raise HeadwiseError(
                f"--length {options.length} is below the dense_below of {below} of {name}: "
                "Headwise would be dense; ask for a longer prompt"
            )
        about[name] = {
            "name": paths[name].name,
            "content_sha256": loaded.artifact.content_sha256,
            "lost_high": _proven(loaded.artifact, options.length),
            "heads": _heads(loaded.artifact),
        }
    return served, about, [load_pair(path)[1] for path in dict.fromkeys(paths.values())]


def _proven(artifact: Artifact, length: int) -> float | None:
    """The bound of the lost answers that is proven at that length; None without one."""
    verdict = artifact.evidence.verdict
    measured = artifact.evidence.measured_length
    if verdict is None or not verdict.proven or measured != length:
        return None
    return verdict.lost_high


def _heads(artifact: Artifact) -> dict[str, int]:
    """How many heads there are, and how many spend by the prompt: by `coverage`, or skipping."""
    rows = [row for row in artifact.prefill.layers if row is not None]
    patterns = [artifact.patterns[name] for row in rows for name in row]
    return {
        "all": artifact.model.num_layers * artifact.model.num_heads,
        "coverage": sum(getattr(each, "coverage", None) is not None for each in patterns),
        "skip_softmax": sum(each.kind == "skip_softmax" for each in patterns),
    }


def _requests(options: argparse.Namespace, loaded: LoadedModel, seen: Seen) -> list[Request]:
    """The prompts, task by task, from where `headwise gate` takes its own."""
    check_positions(options.length, info_of(loaded), strict=True)
    held_out = HeldOut(
        map(parse_task, options.tasks),
        loaded,
        length=options.length,
        samples=1,
        seed=options.seed,
        seen=seen,
        first=GATE_SET,
    )
    made: dict[str, list[Request]] = {}
    for _ in range(0, options.contexts, _BATCH):
        for sequence in sequences(held_out.take("answer", _BATCH), loaded.tokenizer):
            made.setdefault(sequence.task, []).append(request_of(sequence))
    for task in options.tasks:
        if not any(name.partition("@")[0] == task.partition("@")[0] for name in made):
            raise HeadwiseError(f"--tasks {task} has no answers: take a task that asks")
    for task, own in made.items():
        if len(own) < options.contexts:
            announce(f"{task}: {len(own)} contexts, its text has no more that is not seen")
    return [request for own in made.values() for request in own[: options.contexts]]


def _header(options: argparse.Namespace, weights: str) -> dict[str, Any]:
    import openvino_genai

    named = [word.rpartition("=") for word in sys.argv[1:]]
    words = [f"{name}{equals}{Path(path).name or path}" for name, equals, path in named]
    engine = {"openvino": version("openvino"), "openvino_genai": openvino_genai.__version__}
    return {
        "what": "Correct answers and seconds to the first token by method, on the same prompts",
        "command": " ".join(["python benchmarks/openvino.py", *words]),
        "commit": commit(),
        "machine": environment("cpu")["device"],
        "versions": versions() | engine,
        "model": Path(options.model).name,
        "tokens": options.length,
        "settings": {
            "weights_sha256": weights,
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "seed": options.seed,
            "block": options.block,
            "stride": options.stride,
        },
    }


def _methods(
    options: argparse.Namespace, model: Any, served: Mapping[str, LoadedArtifact]
) -> _Methods:
    """Makers of the methods, dense ones of both engines first."""

    def of_torch(enter: Callable[[], AbstractContextManager[object]]) -> Any:
        return lambda _: TorchEngine(model, enter)

    def of_artifact(artifact: LoadedArtifact) -> Any:
        return of_torch(lambda: artifact.apply(model, check_weights=False, strict=True))

    def of_openvino(threshold: float | None) -> Any:
        return lambda graphs: OpenVINOEngine(options, model, graphs, threshold)

    methods = {
        MODEL: of_torch(lambda: dense(model, MODEL)),
        OPENVINO: of_openvino(None),
        KERNEL: of_torch(lambda: dense(model, KERNEL)),
    }
    methods |= {name: of_artifact(artifact) for name, artifact in served.items()}
    methods |= {f"{XATTENTION}_{each:g}": of_openvino(each) for each in options.thresholds}
    return {name: make for name, make in methods.items() if name not in options.without}


def _measure_accuracy(
    record: Record, methods: _Methods, requests: list[Request], graphs: Graphs
) -> None:
    """Method by method, so that one pipeline at a time is in memory."""
    with phase("accuracy", len(methods) * len(requests), "prompts") as shown:
        for name, make in methods.items():
            left = [each for each in requests if name not in record.prompts[each.digest]["log_p"]]
            shown.skip(len(requests) - len(left))
            if not left:
                continue
            method = make(graphs)
            for request in left:
                shown.note(f"{name}, {request.task}")
                record.put_log_p(request.digest, name, method.log_p(request))
                shown.update()


def _measure_seconds(
    record: Record, methods: _Methods, requests: list[Request], graphs: Graphs
) -> None:
    """Prompt by prompt, each by all methods in one turn, after one prompt that is not measured.

    A prompt that lacks a method is timed again by all: a speed-up compares times of one turn.
    """
    timed = {request: record.prompts[request.digest]["seconds"].keys() for request in requests}
    left = [request for request, names in timed.items() if not methods.keys() <= names]
    if not left:
        return
    record.check_machine()
    if dropped := sorted({name for request in left for name in timed[request]} - methods.keys()):
        announce(f"seconds of an earlier turn are replaced; not timed again: {', '.join(dropped)}")
    with phase("first token", len(left) * len(methods), "prompts") as shown:
        made = {name: make(graphs) for name, make in methods.items()}
        for name, method in made.items():
            shown.note(f"{name}, not measured")
            method.seconds(left[-1])
        for request in left:
            seconds = {}
            for name, method in made.items():
                shown.note(f"{name}, {request.task}")
                seconds[name] = round(method.seconds(request), 4)
                shown.update()
            record.put_turn(request.digest, seconds)


def main() -> int:
    """Measure, and print the table."""
    record = run(parser().parse_args())
    print(table(record.rows()))
    return 0


if __name__ == "__main__":
    # This file must not hide the package of the same name.
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    run_command(lambda _: main())
