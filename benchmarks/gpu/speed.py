"""Attention, decode and whole models on a GPU, against the fastest dense attention of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from decode_speed import measure_decode

from artifacts import Artifact, AShape, BlockSparse, Imported, Prefill, VerticalSlash
from artifacts.schema.patterns import PatternRecord
from kernels.patterns import LayerPlan, Pattern, make
from profiling.speed.attention_speed import Size, measure, paper_patterns, patterns_for
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense, of_rounds
from profiling.speed.latency import medians, prefill, time_calls
from runtime import LoadedArtifact
from runtime.fingerprint import fingerprint

# Writes a row of the report.
Emit = Callable[[dict[str, Any]], None]

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
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 260,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurements, and their repeats.

    Attributes:
        matrix: rows and columns of the products.
        copied: bytes of a copy.
        heads, kv_heads, head_dim: of a layer's attention.
        selected: keys that a token reads in sparse decode.
        attention_lengths, decode_lengths, prefill_lengths: in tokens.
        models: shapes by name.
        searched: name of the shape that is searched, and the tokens of a prompt.
        search_options: of headwise.search.
    """

    dtype: str
    matrix: int
    copied: int
    heads: int
    kv_heads: int
    head_dim: int
    patterns: Sequence[Pattern]
    selected: int
    attention_lengths: Sequence[int]
    decode_lengths: Sequence[int]
    prefill_lengths: Sequence[int]
    models: Mapping[str, Mapping[str, Any]]
    searched: tuple[str, int]
    search_options: Mapping[str, Any]
    attention_repeats: int
    decode_repeats: int
    prefill_repeats: int

    def layer(self, length: int, device: str) -> Size:
        """A layer's attention at this length."""
        return Size(
            length=length,
            head_dim=self.head_dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dtype=self.dtype,
            device=device,
        )


def measured_sizes(lengths: Sequence[int]) -> Sizes:
    """Sizes of an 8B model's layer, and both models."""
    return Sizes(
        dtype="bfloat16",
        matrix=8192,
        # Larger than any cache of the second level.
        copied=2**31,
        heads=32,
        kv_heads=8,
        head_dim=128,
        patterns=paper_patterns(),
        selected=2048,
        attention_lengths=lengths,
        decode_lengths=lengths,
        prefill_lengths=lengths,
        models=SHAPES,
        searched=("1B", 4096),
        search_options={},
        attention_repeats=3,
        decode_repeats=20,
        prefill_repeats=3,
    )


def rehearsed_sizes() -> Sizes:
    """Tiny sizes, for Triton's interpreter."""
    return Sizes(
        dtype="float16",
        matrix=256,
        copied=2**20,
        heads=2,
        kv_heads=1,
        head_dim=64,
        patterns=patterns_for(130, 0.3)[:3],
        selected=64,
        attention_lengths=(130,),
        decode_lengths=(200,),
        prefill_lengths=(70,),
        models={"tiny": _TINY},
        searched=("tiny", 256),
        search_options={"tasks": ("passkey",)},
        attention_repeats=0,
        decode_repeats=1,
        prefill_repeats=0,
    )


def rates(device: str, sizes: Sizes) -> dict[str, Any]:
    """Bytes a second of a copy, read and written, and operations a second of matrix products."""
    n = sizes.matrix
    a = torch.randn(n, n, device=device, dtype=torch.float32).to(getattr(torch, sizes.dtype))
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs = {"copy": lambda: target.copy_(source), "product": lambda: a @ a}
    seconds = medians(time_calls(runs, repeats=5, device=device))
    return {
        "copied bytes a second": 2 * source.numel() / seconds["copy"],
        f"operations a second, {n} x {n}": 2 * n**3 / seconds["product"],
    }


def attention(device: str, sizes: Sizes, emit: Emit) -> None:
    """Time a layer's attention by published patterns, each compared with the reference first."""
    for length in sizes.attention_lengths:
        size = sizes.layer(length, device)
        for speed in measure(size, sizes.patterns, repeats=sizes.attention_repeats):
            took = speed.sparse_seconds + speed.build_seconds
            emit(
                {
                    "length": length,
                    **asdict(speed),
                    "times the fastest of torch": speed.sdpa_seconds / took,
                    "operations a second": speed.flops / speed.sparse_seconds,
                }
            )


def decode(device: str, sizes: Sizes, emit: Emit) -> None:
    """Time a token over all and over selected keys, compared with the reference first."""
    for length in sizes.decode_lengths:
        size = sizes.layer(length, device)
        speed = measure_decode(size, keys=sizes.selected, repeats=sizes.decode_repeats)
        emit({"length": length, **asdict(speed)})


def model(device: str, sizes: Sizes, emit: Emit) -> None:
    """Prefills of shapes with random weights, densely and with patterns, interleaved.

    Half of the heads are vertical-slash, a quarter each A-shape and block-sparse, each at a density
    of about a quarter, a search's default budget. Seconds do not depend on the weights, but for the
    density of vertical-slash, whose best diagonals lie scattered here."""
    for name, shape in sizes.models.items():
        _prefills(name, shape, device, sizes, emit)


@torch.no_grad()
def _prefills(name: str, shape: Mapping[str, Any], device: str, sizes: Sizes, emit: Emit) -> None:
    """Emit the seconds of a shape's prefills at each length; the longest are timed once."""
    config = transformers.LlamaConfig(**shape)
    with torch.device(device):
        llama = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, sizes.dtype)
        ).eval()
    for length in sizes.prefill_lengths:
        headwise = LoadedArtifact(_artifact(llama, length))
        contexts = {
            MODEL: lambda: dense(llama, MODEL),
            KERNEL: lambda: dense(llama, KERNEL),
            HEADWISE: lambda headwise=headwise: headwise.apply(
                llama, check_weights=False, strict=True
            ),
        }
        ids = torch.randint(3, 90, (1, length), device=device)
        repeats = sizes.prefill_repeats
        if length > 65_536:
            repeats = 1
        seconds = time_calls(
            dict.fromkeys(contexts, lambda ids=ids: prefill(llama, ids)),
            contexts=contexts,
            repeats=repeats,
            device=device,
        )
        speedup = of_rounds(seconds, HEADWISE)
        emit(
            {
                "shape": name,
                "length": length,
                "density": _density(config, length, device, sizes.dtype),
                "seconds": seconds,
                "times the fastest dense": speedup.value,
            }
        )


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
    q = torch.randn(1, heads, length, config.head_dim, device=device, dtype=torch.float32).to(
        getattr(torch, dtype)
    )
    k = q[:, : config.num_key_value_heads]
    patterns = _patterns(length)
    plan = LayerPlan(
        [make(**patterns[name].model_dump()) for name in _of_heads(heads)],
        config.num_key_value_heads,
    )
    return float(plan.build(q, k).density().mean())


def _artifact(llama: Any, length: int) -> Artifact:
    layers = (_of_heads(llama.config.num_attention_heads),) * llama.config.num_hidden_layers
    # Patterns of an artifact come from a search or from a file.
    imported = Imported(format="minference", file="none.json", sha256="0" * 64)
    return Artifact(
        model=fingerprint(llama, name="8B shape"),
        search=None,
        patterns=_patterns(length),
        prefill=Prefill(dense_below=64, layers=layers, imported=imported),
    )
