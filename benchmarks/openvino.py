"""Accuracy and speed of Headwise, dense attention and OpenVINO GenAI, on the same prompts.

    pip install 'openvino-genai>=2026.4'
    python benchmarks/openvino.py cfg.yaml --model smollm2 --length 8192 --out FILE.json

OpenVINO GenAI serves the model densely and with XAttention, its sparse prefill. An answer is right
if each of its tokens has p > 0.5, given the right ones before it: one rule for all methods. Prompts
are held out: no search has seen them. Seconds to the first token are of the same prompts, methods
interleaved. The file is saved after each measurement; the same command resumes it, and further
tasks, contexts, thresholds, points and artifacts are added to it.

openvino_export.py makes the graph that OpenVINO serves, openvino_record.py the file.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from openvino_export import exported, mark
from openvino_record import DENSE, OPENVINO, XATTENTION, LogP, Record, table

from artifacts import Artifact, HeadwiseError, load_pair
from artifacts.cli.command import run_command
from profiling.environment import environment, versions
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import phase
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.tokens import Ids
from profiling.quality.contexts import fed
from profiling.quality.forced import token_losses
from profiling.quality.sequences import TokenSequence, sequences
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense
from runtime import LoadedArtifact
from runtime import load as load_headwise
from runtime.fingerprint import check
from runtime.layers import text_config
from search.model.prompts import HeldOut

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


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt that is served at once, and the answers that are measured on it.

    Attributes:
        digest: of its sequence.
        task: as profiling.prompts.prompt.Task.name has it.
        ids: tokens of the prompt.
        after: tokens of an answer that is generated after it; empty if the answers are in it.
        answers: half-open ranges of right answers in ids + after.
    """

    digest: str
    task: str
    ids: Ids
    after: Ids
    answers: tuple[tuple[int, int], ...]

    @property
    def before(self) -> list[int]:
        """Positions before the tokens of the answers."""
        return [at for start, stop in self.answers for at in range(start - 1, stop - 1)]

    def least(self, log_p: list[float | None]) -> list[float | None]:
        """The least of each answer, of log p at `before`; None where one is None."""
        rest = iter(log_p)
        answers = []
        for start, stop in self.answers:
            own = [next(rest) for _ in range(start, stop)]
            known = [value for value in own if value is not None]
            answers.append(round(min(known), 4) if len(known) == len(own) else None)
        return answers


def request_of(sequence: TokenSequence) -> Request:
    """The prompt of a sequence, with the answers in it, or the only one after it.

    Later turns are left out: Headwise serves them densely, but OpenVINO cannot.

    Raises:
        HeadwiseError: all answers are in later turns.
    """
    size = sequence.context
    answers = tuple(span for span in sequence.answers if span[1] <= size)
    after: Ids = ()
    if not answers and len(sequence.answers) == 1 and sequence.answers[0][0] == size:
        answers = sequence.answers
        after = sequence.ids[size : answers[0][1]]
    if not answers:
        raise HeadwiseError(
            f"--tasks {sequence.task} has no answer in its prompts or right after them: take one "
            "without later turns"
        )
    return Request(
        digest=sequence.digest[:16],
        task=sequence.task,
        ids=sequence.ids[:size],
        after=after,
        answers=answers,
    )


@dataclass(frozen=True)
class _Torch:
    """The model under dense attention or an artifact."""

    model: Any
    enter: Callable[[], AbstractContextManager[object]]

    @torch.inference_mode()
    def seconds(self, request: Request) -> float:
        """Seconds to the first token."""
        ids = torch.tensor([request.ids], dtype=torch.long, device="cpu")
        with self.enter():
            start = time.perf_counter()
            output = self.model(ids, past_key_values=self._cache(), logits_to_keep=1)
            int(output.logits[0, -1].argmax())
            return time.perf_counter() - start

    @torch.inference_mode()
    def log_p(self, request: Request) -> LogP:
        """See openvino_record.LogP; the prompt is one prefill, and decode follows it."""
        ids = torch.tensor([request.ids], dtype=torch.long, device="cpu")
        size = len(request.ids)
        inside = torch.tensor([at for at in request.before if at < size], device="cpu")
        with self.enter():
            cache = self._cache()
            logits = self.model(ids, past_key_values=cache, logits_to_keep=inside).logits[0]
            if len(request.after) > 1:
                logits = torch.cat([logits, fed(self.model, request.after[:-1], cache)])
        everything = request.ids + request.after
        targets = torch.tensor([everything[at + 1] for at in request.before], device="cpu")
        return request.least((-token_losses(logits, targets)).tolist())

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=text_config(self.model))


@dataclass(frozen=True, kw_only=True)
class _Graphs:
    """The export, and the one of openvino_export.mark with its tokens' numbers."""

    plain: Path
    marked: Path
    numbers: Mapping[int, int]


class _OpenVINO:
    """OpenVINO GenAI's pipeline: a prompt in one batch, as many threads as torch has."""

    def __init__(
        self, options: argparse.Namespace, model: Any, graphs: _Graphs, threshold: float | None
    ) -> None:
        """Prepare; with a threshold XAttention serves prefills."""
        self._options = options
        self._model = model
        self._graphs = graphs
        self._threshold = threshold
        self._loaded: tuple[Path, Any] | None = None

    def _pipeline(self, folder: Path) -> Any:
        """The pipeline of a graph; one at a time is held."""
        if self._loaded is None or self._loaded[0] != folder:
            self._loaded = None
            self._loaded = folder, self._load(folder)
        return self._loaded[1]

    def _load(self, folder: Path) -> Any:
        import openvino_genai as genai

        of = text_config(self._model)
        tokens = self._options.length + 256
        scheduler = genai.SchedulerConfig()
        # XAttention cannot serve the end of a prompt densely: on a CPU its option
        # num_last_dense_tokens_in_prefill spoils all chunks but the last, which stays sparse, and
        # has no effect on a prompt in one batch.
        scheduler.max_num_batched_tokens = tokens
        scheduler.enable_prefix_caching = False
        dim = getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
        # In GiB; keys and values of at most 4 bytes, and room for as much again.
        held = 2 * 4 * of.num_hidden_layers * of.num_key_value_heads * dim * tokens
        scheduler.cache_size = math.ceil(2 * held / 2**30)
        if self._threshold is not None:
            scheduler.use_sparse_attention = True
            scheduler.sparse_attention_config = genai.SparseAttentionConfig(
                mode=genai.SparseAttentionMode.XATTENTION,
                xattention_threshold=self._threshold,
                xattention_block_size=self._options.block,
                xattention_stride=self._options.stride,
            )
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        if self._options.dtype == "float32":
            settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        return genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", settings, {})

    def seconds(self, request: Request) -> float:
        """Seconds to the first token."""
        pipeline = self._pipeline(self._graphs.plain)
        result = pipeline.generate([_tensor(request.ids)], [_generation(1)])[0]
        return float(result.perf_metrics.get_ttft().mean) / 1e3

    def log_p(self, request: Request) -> LogP:
        """See openvino_record.LogP."""
        if request.after:
            return self._generated(request)
        numbers = self._graphs.numbers
        ids = [numbers[token] for token in request.ids]
        for at in request.before:
            ids[at] += len(numbers)
        generation = _generation(1)
        generation.logprobs = 1
        generation.echo = True
        output = _output(self._pipeline(self._graphs.marked), ids, generation)
        # See openvino_export.mark for the half.
        log_p = [value + math.log(2) for value in output.generated_log_probs]
        return request.least([log_p[at + 1] for at in request.before])

    def _generated(self, request: Request) -> LogP:
        """log p of an answer after the prompt; a token with p > 0.5 is the likeliest."""
        generation = _generation(len(request.after))
        generation.logprobs = 1
        output = _output(self._pipeline(self._graphs.plain), request.ids, generation)
        tokens = zip(output.generated_ids, output.generated_log_probs, strict=True)
        log_p: list[float | None] = []
        for right, (token, value) in zip(request.after, tokens, strict=True):
            # After a wrong token nothing is known.
            known = token == right and None not in log_p
            log_p.append(value if known else None)
        return request.least(log_p)


def _output(pipeline: Any, ids: Sequence[int], generation: Any) -> Any:
    handle = pipeline.add_request(0, _tensor(ids), generation)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return handle.read_all()[0]


def _tensor(ids: Sequence[int]) -> Any:
    import numpy as np
    import openvino

    return openvino.Tensor(np.array([ids], dtype=np.int64))


def _generation(tokens: int) -> Any:
    import openvino_genai

    generation = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
    generation.do_sample = False
    return generation


_Methods = Mapping[str, Callable[[_Graphs], _Torch | _OpenVINO]]


def run(options: argparse.Namespace) -> Record:
    """Measure what the file does not have.

    Raises:
        HeadwiseError: a mistake of the user, or the engines' dense attentions do not agree.
    """
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
        graphs = _Graphs(plain=folder, marked=Path(scratch), numbers=numbers)
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
            "heads": _heads(loaded.artifact),
        }
    return served, about, [load_pair(path)[1] for path in dict.fromkeys(paths.values())]


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
    held_out = HeldOut(
        options.tasks,
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
    return [request for own in made.values() for request in own[: options.contexts]]


def _header(options: argparse.Namespace, weights: str) -> dict[str, Any]:
    import openvino_genai

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=True,
    ).stdout.strip()
    words = [str(Path(word).name) if "/" in word else word for word in sys.argv[1:]]
    engine = {"openvino": version("openvino"), "openvino_genai": openvino_genai.__version__}
    return {
        "what": "Correct answers and seconds to the first token by method, on the same prompts",
        "command": " ".join(["python benchmarks/openvino.py", *words]),
        "commit": commit,
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
        return lambda _: _Torch(model, enter)

    def of_artifact(artifact: LoadedArtifact) -> Any:
        return of_torch(lambda: artifact.apply(model, check_weights=False, strict=True))

    def of_openvino(threshold: float | None) -> Any:
        return lambda graphs: _OpenVINO(options, model, graphs, threshold)

    methods = {
        MODEL: of_torch(lambda: dense(model, MODEL)),
        OPENVINO: of_openvino(None),
        KERNEL: of_torch(lambda: dense(model, KERNEL)),
    }
    methods |= {name: of_artifact(artifact) for name, artifact in served.items()}
    methods |= {f"{XATTENTION}_{each:g}": of_openvino(each) for each in options.thresholds}
    return {name: make for name, make in methods.items() if name not in options.without}


def _measure_accuracy(
    record: Record, methods: _Methods, requests: list[Request], graphs: _Graphs
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
                record.put(request.digest, "log_p", name, method.log_p(request))
                shown.update()


def _measure_seconds(
    record: Record, methods: _Methods, requests: list[Request], graphs: _Graphs
) -> None:
    """Prompt by prompt, each by all methods in turn, after one prompt that is not measured."""
    left = {
        request: [name for name in methods if name not in record.prompts[request.digest]["seconds"]]
        for request in requests
    }
    count = sum(map(len, left.values()))
    if not count:
        return
    record.check_machine()
    total = len(requests) * len(methods)
    with phase("first token", total, "prompts") as shown:
        shown.skip(total - count)
        needed = [name for name in methods if any(name in names for names in left.values())]
        made = {name: methods[name](graphs) for name in needed}
        for name, method in made.items():
            shown.note(f"{name}, not measured")
            method.seconds(requests[-1])
        for request, names in left.items():
            for name in names:
                shown.note(f"{name}, {request.task}")
                seconds = round(made[name].seconds(request), 4)
                record.put(request.digest, "seconds", name, seconds)
                shown.update()


def main() -> int:
    """Measure, and print the table."""
    record = run(parser().parse_args())
    print(table(record.content()["rows"]))
    return 0


if __name__ == "__main__":
    # This file must not hide the package of the same name.
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    run_command(lambda _: main())
