"""A whole default search on a GPU, of a shape with random weights, and its artifact served."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import headwise
from profiling.speed.latency import prefill
from runtime.layers import attention_layers

if TYPE_CHECKING:
    from speed import Sizes

# A line of a phase that has ended, as the search prints it.
_PHASE = re.compile(r"^(.+): \d+ of \d+ .* in ([\d:]+)$")


def search(device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Search a shape by the defaults, and serve a prompt by the artifact.

    The weights are random: seconds and memory are a real model's, density and losses are not.

    Returns:
        One row: seconds of the search and of its phases, peak bytes on the device, the verdict,
        heads by kind, and calls of the served prefill.
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
    lines = StringIO()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cfg.yaml"
        began = time.perf_counter()
        with redirect_stderr(lines):
            recorded = headwise.search(
                model,
                _byte_tokenizer(),
                out=out,
                name=name,
                length=length,
                keep=True,
                **sizes.search_options,
            )
        seconds = time.perf_counter() - began
        assert recorded is not None, "there is one rank"
        ids = torch.randint(3, 90, (1, length), device=device)
        with headwise.load(out).apply(model, strict=True) as handle:
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
    row = {
        "shape": name,
        "length": length,
        "layers": len(attention_layers(model)),
        "weights": weights,
        "peak bytes": peak,
        "seconds": seconds,
        "phases": _phases(lines.getvalue()),
        "why no gradients": artifact.search and artifact.search.gradient_fault,
        "verdict": artifact.evidence.proof,
        "heads": dict(kinds),
        "served": served,
    }
    return [row]


def _phases(printed: str) -> dict[str, int]:
    """Whole seconds of each phase, summed where it ran several times."""
    seconds: Counter[str] = Counter()
    for line in printed.splitlines():
        if match := _PHASE.match(line):
            parts = [int(part) for part in match[2].split(":")]
            seconds[match[1]] += sum(part * 60**at for at, part in enumerate(reversed(parts)))
    return dict(seconds)


def _byte_tokenizer() -> Any:
    """A tokenizer of bytes: its ids are valid in any model of 256 tokens or more."""
    vocab = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
