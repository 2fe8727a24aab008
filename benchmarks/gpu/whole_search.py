"""A whole search on a GPU, of a shape with random weights, and its artifact served."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import transformers
from run import code
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import headwise
from profiling.prompts.prompt import CALIBRATED_TASKS, GATE_TASKS, make_prompts, per_context
from profiling.speed.latency import prefill
from runtime.layers import attention_layers

if TYPE_CHECKING:
    from speed import Sizes

# A line of a phase that has ended, as the search prints it.
_PHASE = re.compile(r"^(.+): (\d+) of \d+ (\w+) in ([\d:]+)$")
# Losses of random weights mean nothing; an artifact that gains nothing is written and served, too.
_OPTIONS = {
    "budget": 0.35,
    "max_lost": 1.0,
    "max_perplexity": 1e9,
    "keep": True,
    "dense_below": 64,
    "picture": False,
}


class _Phases:
    """Passes stderr on, and emits each phase that has ended."""

    def __init__(self, stream: TextIO, emit: Callable[[dict[str, Any]], None]) -> None:
        self._stream = stream
        self._emit = emit

    def write(self, text: str) -> int:
        """Write to the stream; a phase's line is written by one call."""
        if match := _PHASE.match(text):
            minutes_and_seconds = [int(part) for part in match[4].split(":")]
            seconds = sum(part * 60**at for at, part in enumerate(reversed(minutes_and_seconds)))
            self._emit({"phase": match[1], match[3]: int(match[2]), "seconds": seconds})
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def isatty(self) -> bool:
        """False: phases are lines."""
        return False


def search(device: str, sizes: Sizes, out: Path, emit: Callable[[dict[str, Any]], None]) -> None:
    """Search a shape by the defaults, whatever it loses or gains, and serve a prompt by it.

    The weights are random: seconds and memory are a real model's, density and losses are not. The
    last row has seconds of the search, peak bytes on the device, the verdict, heads by kind, and
    calls of the served prefill; the rows before it are the phases.

    Args:
        device: of the model.
        sizes: its shape and length.
        out: folder in which a search that was stopped leaves its resume file.
        emit: writes a row.
    """
    name, length = sizes.searched
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes.models[name])
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, sizes.dtype)
        ).eval()
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    # The resume file of a search by other code is of no use.
    folder = out / f"search-{code()}"
    for other in out.glob("search-*"):
        if other != folder:
            shutil.rmtree(other)
    resumed = folder.exists()
    folder.mkdir(exist_ok=True)
    file = folder / "cfg.yaml"
    began = time.perf_counter()
    with redirect_stderr(_Phases(sys.stderr, emit)):  # type: ignore[type-var]
        recorded = headwise.search(
            model,
            _byte_tokenizer(),
            out=file,
            name=name,
            length=length,
            **_OPTIONS,
            **sizes.search_options,
        )
    seconds = time.perf_counter() - began
    assert recorded is not None, "there is one rank"
    ids = torch.randint(3, 90, (1, length), device=device)
    with headwise.load(file).apply(model, strict=True) as handle:
        prefill(model, ids)
        served = handle.stats()
    if not served["sparse"]:
        raise SystemExit(f"no layer of {name} was served sparsely: {served}")
    artifact = recorded.artifact
    kinds = Counter(
        artifact.patterns[pattern].kind for row in artifact.prefill.layers for pattern in row or ()
    )
    peak = None
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device)
    emit(
        {
            "shape": name,
            "length": length,
            "layers": len(attention_layers(model)),
            "weights": weights,
            "peak bytes": peak,
            "seconds": seconds,
            "resumed": resumed,
            "why no gradients": artifact.search and artifact.search.gradient_fault,
            "verdict": artifact.evidence.proof,
            "heads": dict(kinds),
            "served": served,
        }
    )
    shutil.rmtree(folder)


def check_prompts(sizes: Sizes) -> None:
    """Make prompts of all tasks of the measured search, which a rehearsal's is too short for."""
    _, length = sizes.searched
    tokenizer = _byte_tokenizer()
    for task in dict.fromkeys((*CALIBRATED_TASKS, *GATE_TASKS)):
        make_prompts(task, tokenizer, length=length, samples=per_context(task), seed=0)


def _byte_tokenizer() -> Any:
    """A tokenizer of bytes: its ids are valid in any model of 256 tokens or more."""
    vocab = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
