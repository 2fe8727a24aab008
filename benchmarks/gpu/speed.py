"""Attention, decode and an 8B shape on a GPU, against the fastest dense attention of torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import transformers

from artifacts import Artifact, AShape, BlockSparse, Imported, Prefill, VerticalSlash
from profiling.speed.attention_speed import measure, paper_patterns, patterns_for
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense, of_rounds
from profiling.speed.config import Size
from profiling.speed.decode_speed import measure_decode
from profiling.speed.latency import in_turn, interleaved, medians, prefill
from runtime import Headwise
from runtime.fingerprint import fingerprint

LENGTHS = (8192, 32_768, 131_072)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 2**20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e8},
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 1024,
}


def size_of(length: int, device: str, dtype: str, small: bool) -> Size:
    """The attention of an 8B model's layer at that length; a tiny one in a rehearsal."""
    heads, kv_heads, head_dim = (2, 1, 64) if small else (32, 8, 128)
    return Size(
        length=length, head_dim=head_dim, heads=heads, kv_heads=kv_heads, dtype=dtype, device=device
    )


def rates(device: str, dtype: str, small: bool) -> dict[str, Any]:
    """Bytes a second of a copy, read and written, and operations a second of matrix products."""
    n = 256 if small else 8192
    a = torch.randn(n, n, device=device).to(getattr(torch, dtype))
    # Larger than any cache of the second level.
    source = torch.empty((1 if small else 2048) * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs = {"copy": lambda: target.copy_(source), "product": lambda: a @ a}
    seconds = medians(in_turn(runs, repeats=5, device=device))
    return {
        "copied bytes a second": 2 * source.numel() / seconds["copy"],
        f"operations a second, {n} x {n}": 2 * n**3 / seconds["product"],
    }


def attention(device: str, dtype: str, small: bool) -> list[dict[str, Any]]:
    """Time a layer's attention by published patterns, each compared with the reference first."""
    found = []
    for length in (130,) if small else LENGTHS:
        size = size_of(length, device, dtype, small)
        if small:
            patterns = patterns_for(length, 0.3)[:3]
        else:
            patterns = paper_patterns()
        for speed in measure(size, patterns, repeats=0 if small else 3):
            took = speed.sparse_seconds + speed.build_seconds
            found.append(
                {
                    "length": length,
                    **asdict(speed),
                    "times the fastest of torch": speed.sdpa_seconds / took,
                    "operations a second": speed.flops / speed.sparse_seconds,
                }
            )
    return found


def decode(device: str, dtype: str, small: bool) -> list[dict[str, Any]]:
    """Time a token over all and over 2,048 chosen keys, compared with the reference first."""
    found = []
    for length in (200,) if small else LENGTHS:
        size = size_of(length, device, dtype, small)
        speed = measure_decode(size, chosen=64 if small else 2048, repeats=1 if small else 20)
        found.append({"length": length, **asdict(speed)})
    return found


@torch.no_grad()
def model(device: str, dtype: str, small: bool) -> list[dict[str, Any]]:
    """Prefills of an 8B shape with random weights, densely and with patterns, interleaved.

    Half of the heads are vertical-slash, a quarter each A-shape and block-sparse. Seconds do not
    depend on the weights, but for the density of vertical-slash."""
    config = transformers.LlamaConfig(**TINY if small else LLAMA_8B)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype)
        ).eval()
    headwise = Headwise(_artifact(made, small))
    contexts = {
        MODEL: lambda: dense(made, MODEL),
        KERNEL: lambda: dense(made, KERNEL),
        HEADWISE: lambda: headwise.apply(made, check_weights=False, strict=True),
    }
    found = []
    for length in (70,) if small else LENGTHS:
        ids = torch.randint(3, 90, (1, length), device=device)
        if small:
            repeats = 0
        else:
            repeats = 1 if length > 65_536 else 3
        seconds = interleaved(
            contexts, lambda ids=ids: prefill(made, ids), repeats=repeats, device=device
        )
        speedup = of_rounds(seconds, HEADWISE)
        found.append(
            {"length": length, "seconds": seconds, "times the fastest dense": speedup.value}
        )
    return found


def _artifact(made: Any, small: bool) -> Artifact:
    patterns = {
        "vs": VerticalSlash(vertical=64 if small else 1000, slash=64 if small else 2048),
        "a": AShape(sink=64 if small else 1024, window=64 if small else 4096),
        "bs": BlockSparse(blocks=2 if small else 100),
    }
    heads = made.config.num_attention_heads
    row = tuple(("vs", "a", "vs", "bs")[head * 4 // heads] for head in range(heads))
    layers = (row,) * made.config.num_hidden_layers
    # Patterns of an artifact come from a search or from a file.
    imported = Imported(format="minference", file="none.json", sha256="0" * 64)
    return Artifact(
        model=fingerprint(made, name="8B shape"),
        search=None,
        patterns=patterns,
        prefill=Prefill(dense_below=64, layers=layers, imported=imported),
    )
