"""A model of 8B parameters with random weights, from end to end: prefill, decode and offload, dense and with patterns.

What is measured does not depend on the weights, but for the density of vertical-slash, which its index says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers

from artifacts import Artifact, AShape, BlockSparse, Decode, OmniKV, Pattern, Prefill, VerticalSlash
from profiling.gpu.steps import Rows, Setting
from profiling.models.loading import LoadedModel
from profiling.speed.baselines import KERNEL, MODEL, dense, of_rounds
from profiling.speed.decode_steps import methods, step_seconds
from profiling.speed.latency import interleaved, medians, prefill
from profiling.startup import example
from runtime import Headwise
from runtime.fingerprint import fingerprint

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
_TINY = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 97, "max_position_embeddings": 1024,
}  # fmt: skip
_LENGTHS = {"prefill": (32_768, 131_072, 8192), "decode": (131_072,)}


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps."""
    if setting.small:
        return ["prefill 70", "decode 130"]
    return [f"{what} {length}" for what, lengths in _LENGTHS.items() for length in lengths]


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """Seconds of each way to serve, in turn."""
    what, length = piece.split()
    loaded = loaded_model(setting)
    headwise = sparse_model(setting)
    with torch.no_grad():
        found = (_prefill if what == "prefill" else _decode)(loaded, headwise, int(length), setting)
    return {"what": what, "tokens": int(length), "seconds": found}


@cache
def loaded_model(setting: Setting) -> LoadedModel:
    """The model with random weights; a tiny one in a rehearsal."""
    config = transformers.LlamaConfig(**_TINY if setting.small else LLAMA_8B)
    with torch.device(setting.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype)).eval()
    return LoadedModel(model=model, tokenizer=None, name="8B shape", revision=None)


@cache
def sparse_model(setting: Setting) -> Headwise:
    """Half of the heads vertical-slash, a quarter each A-shape and block-sparse; OmniKV with two filter layers."""
    model = loaded_model(setting).model
    small = setting.small
    patterns: dict[str, Pattern] = {
        "vs": VerticalSlash(vertical=64 if small else 1000, slash=64 if small else 2048),
        "a": AShape(sink=64 if small else 1024, window=64 if small else 4096),
        "bs": BlockSparse(blocks=2 if small else 100),
    }
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    row = tuple(("vs", "a", "vs", "bs")[head * 4 // heads] for head in range(heads))
    decode = OmniKV(
        filter_layers=(1,) if small else (4, 16),
        dense_layers=(0,) if small else (0, 1, 2, 3),
        selector="last",
        window=4,
        budget=64 if small else 4096,
    )
    return Headwise(
        Artifact(
            model=fingerprint(model, name="8B shape"),
            search=example(layers=1, heads=1, names=1).search,
            patterns={name: pattern for name, pattern in patterns.items() if name in row},
            prefill=Prefill(dense_below=64, layers=(row,) * layers),
            decode=Decode(omnikv=decode),
        )
    )


def _prefill(loaded: LoadedModel, headwise: Headwise, length: int, setting: Setting) -> dict[str, list[float]]:
    model = loaded.model
    ids = torch.randint(3, 90, (1, length), device=setting.device)
    contexts = {
        MODEL: lambda: dense(model, MODEL),
        KERNEL: lambda: dense(model, KERNEL),
        "headwise": lambda: headwise.apply(model, check_weights=False, strict=True),
    }
    repeats = 0 if setting.small else 1 if length > 65_536 else 3
    return interleaved(contexts, lambda: prefill(model, ids), repeats=repeats, device=setting.device)


def _decode(loaded: LoadedModel, headwise: Headwise, length: int, setting: Setting) -> dict[str, list[float]]:
    """Seconds a token: dense, and with chosen tokens that lie on the device or in the CPU's memory."""
    offloads = ("never",) if setting.device == "cpu" else ("never", "packed", "brutal")
    steps, repeats = (1, 0) if setting.small else (16, 3)
    compared = methods(loaded, {"headwise": headwise}, offloads)
    seconds, _ = step_seconds(loaded, compared, context=length, steps=steps, repeats=repeats, seed=0)
    return {name: [second / steps for second in taken] for name, taken in seconds.items()}


def lines(rows: Rows) -> list[Sequence[str]]:
    """Medians, and factors against the better dense."""
    table: list[Sequence[str]] = [("what", "tokens", "served by", "ms", "x better dense")]
    for row in rows.values():
        for name, seconds in medians(row["seconds"]).items():
            factor = f"{of_rounds(row['seconds'], name).value:.2f}x"
            table.append((row["what"], f"{row['tokens']:,}", name, f"{1e3 * seconds:.2f}", factor))
    return table
