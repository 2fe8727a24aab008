"""Prompts with their answers, and the two engines that openvino.py serves them with."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from openvino_record import LogP

from artifacts import HeadwiseError
from profiling.prompts.tokens import Ids
from profiling.quality.contexts import fed
from profiling.quality.forced import token_losses
from profiling.quality.sequences import TokenSequence
from runtime.layers import text_config


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
class TorchEngine:
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
        before = [at for at in request.before if at < size]
        inside = torch.tensor(before, dtype=torch.long, device="cpu")
        with self.enter():
            cache = self._cache()
            logits = self.model(ids, past_key_values=cache, logits_to_keep=inside).logits[0]
            if len(request.after) > 1:
                logits = torch.cat([logits, fed(self.model, request.after[:-1], cache)])
        everything = request.ids + request.after
        after = [everything[at + 1] for at in request.before]
        targets = torch.tensor(after, dtype=torch.long, device="cpu")
        return request.least((-token_losses(logits, targets)).tolist())

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=text_config(self.model))


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """The export, and the one of openvino_export.mark with its tokens' numbers."""

    plain: Path
    marked: Path
    numbers: Mapping[int, int]


class OpenVINOEngine:
    """OpenVINO GenAI's pipeline: a prompt in one batch, as many threads as torch has."""

    def __init__(
        self, options: argparse.Namespace, model: Any, graphs: Graphs, threshold: float | None
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
