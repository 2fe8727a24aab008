"""Attention, decode and whole models on a GPU, against the fastest dense attention of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers

from artifacts import Artifact, AShape, BlockSparse, Imported, Prefill, VerticalSlash
from artifacts.schema.patterns import PatternRecord
from kernels.patterns import LayerPlan, make
from profiling.speed.attention_speed import measure, paper_patterns, patterns_for
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense, of_rounds
from profiling.speed.config import Size
from profiling.speed.decode_speed import measure_decode
from profiling.speed.latency import in_turn, interleaved, medians, prefill
from runtime import Headwise
from runtime.fingerprint import fingerprint

# Shapes of Llama 3.2 1B and Llama 3.1 8B.
_LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 2**20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e8},
}
SHAPES = {
    "1B": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
    },
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


def attention(device: str, dtype: str, small: bool, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Time a layer's attention by published patterns, each compared with the reference first."""
    found = []
    for length in (130,) if small else lengths:
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


def decode(device: str, dtype: str, small: bool, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Time a token over all and over 2,048 chosen keys, compared with the reference first."""
    found = []
    for length in (200,) if small else lengths:
        size = size_of(length, device, dtype, small)
        speed = measure_decode(size, chosen=64 if small else 2048, repeats=1 if small else 20)
        found.append({"length": length, **asdict(speed)})
    return found


def model(device: str, dtype: str, small: bool, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Prefills of two shapes with random weights, densely and with patterns, interleaved.

    Half of the heads are vertical-slash, a quarter each A-shape and block-sparse, each at a density
    of about a quarter, a search's default budget. Seconds do not depend on the weights, but for the
    density of vertical-slash, whose best diagonals lie scattered here."""
    shapes = {"tiny": TINY} if small else SHAPES
    return [
        row
        for name, shape in shapes.items()
        for row in _prefills(name, shape, device, dtype, (70,) if small else lengths)
    ]


@torch.no_grad()
def _prefills(
    name: str, shape: dict[str, Any], device: str, dtype: str, lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Seconds of a shape's prefills at each length; the longest are timed once."""
    config = transformers.LlamaConfig(**shape)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype)
        ).eval()
    found = []
    for length in lengths:
        headwise = Headwise(_artifact(made, length))
        contexts = {
            MODEL: lambda: dense(made, MODEL),
            KERNEL: lambda: dense(made, KERNEL),
            HEADWISE: lambda headwise=headwise: headwise.apply(
                made, check_weights=False, strict=True
            ),
        }
        ids = torch.randint(3, 90, (1, length), device=device)
        repeats = 1 if length > 65_536 else 3
        if name == "tiny":
            repeats = 0
        seconds = interleaved(
            contexts, lambda ids=ids: prefill(made, ids), repeats=repeats, device=device
        )
        speedup = of_rounds(seconds, HEADWISE)
        found.append(
            {
                "shape": name,
                "length": length,
                "density": _density(config, length, device, dtype),
                "seconds": seconds,
                "times the fastest dense": speedup.value,
            }
        )
    return found


def _patterns(length: int) -> dict[str, PatternRecord]:
    """Patterns of a density of about a quarter, by their names in an artifact."""
    return {
        "vs": VerticalSlash(vertical=max(64, length // 16), slash=64),
        "a": AShape(sink=max(64, length // 32), window=max(64, length // 8)),
        "bs": BlockSparse(blocks=max(2, length // 512)),
    }


def _of_heads(count: int) -> tuple[str, ...]:
    return tuple(("vs", "a", "vs", "bs")[head * 4 // count] for head in range(count))


def _density(config: Any, length: int, device: str, dtype: str) -> float:
    """Density of those patterns on noise: as scattered as a random model's."""
    heads = config.num_attention_heads
    q = torch.randn(1, heads, length, config.head_dim, device=device).to(getattr(torch, dtype))
    k = q[:, : config.num_key_value_heads]
    patterns = _patterns(length)
    plan = LayerPlan(
        [make(**patterns[name].model_dump()) for name in _of_heads(heads)],
        config.num_key_value_heads,
    )
    return float(plan.build(q, k).density().mean())


def _artifact(made: Any, length: int) -> Artifact:
    layers = (_of_heads(made.config.num_attention_heads),) * made.config.num_hidden_layers
    # Patterns of an artifact come from a search or from a file.
    imported = Imported(format="minference", file="none.json", sha256="0" * 64)
    return Artifact(
        model=fingerprint(made, name="8B shape"),
        search=None,
        patterns=_patterns(length),
        prefill=Prefill(dense_below=64, layers=layers, imported=imported),
    )
