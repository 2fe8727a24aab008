"""Counts what a layer's prefill and a decode step launch; as a script it prints them as JSON.

TRITON_INTERPRET=1 python -m tests.kernels.launches > docs/results/gpu_launches.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from kernels.attention import sparse_attention
from kernels.decode import decode_attention
from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged
from kernels.scored import scored_attention
from profiling.gpu import model
from profiling.gpu.launches import Counts, as_on_gpu, counting
from profiling.gpu.steps import Setting
from profiling.speed.decode_steps import fill

# What heads of a layer hold -> its patterns, in turn.
LAYERS = {
    "vertical-slash": [make("vertical_slash", vertical=80, slash=90)],
    "A-shape": [make("a_shape", sink=64, window=64)],
    "A-shape and dense": [make("a_shape", sink=64, window=64), make("dense")],
    "block-sparse": [make("block_sparse", blocks=2)],
    "by 256 last queries": [
        make("vertical_slash", vertical=80, slash=90, last_q=256),
        make("a_shape", sink=64, window=64),
        make("block_sparse", blocks=2),
        make("dense"),
    ],
    "one by mass": [
        make("vertical_slash", vertical=80, slash=90, coverage=0.9),
        make("vertical_slash", vertical=80, slash=90),
        make("block_sparse", blocks=2),
        make("dense"),
    ],
    "all three": [
        make("vertical_slash", vertical=80, slash=90),
        make("a_shape", sink=64, window=64),
        make("block_sparse", blocks=2),
        make("dense"),
    ],
}
LENGTHS = (128, 320)


def prefill(name: str, length: int, *, pages: bool = False, first: bool = False) -> Counts:
    """A call of a plan, the second of its length, where what is made once is there, or the first.

    pages: keys and values lie in pages of 64.
    """
    q = torch.randn(1, 4, length, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 2, length, 64, dtype=torch.float16) for _ in range(2))
    where: dict[str, Any] = {}
    if pages:
        k, v = (x[0].transpose(0, 1).unflatten(0, (-1, 64)) for x in (k, v))
        where = {"block_table": torch.arange(length // 64, dtype=torch.int32).flip(0)[None]}
    more = {"k_len": length} if pages else {}
    patterns = LAYERS[name]
    plan = LayerPlan([patterns[head % len(patterns)] for head in range(4)], 2)
    with torch.no_grad(), as_on_gpu():
        if not first:
            with counting(run=False):
                plan.build(q, k, **where, **more)
        with counting(run=False) as counts:
            sparse_attention(q, k, v, plan.build(q, k, **where, **more), **where, backend="triton")
    return counts


def ragged(name: str, length: int) -> Counts:
    """The second call with two sequences end to end, the first of them of 128 tokens."""
    q = torch.randn(1, 4, 128 + length, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 2, 128 + length, 64, dtype=torch.float16) for _ in range(2))
    where = {"ragged": Ragged.packed((0, 128, 128 + length), (0, 128, 128 + length))}
    patterns = LAYERS[name]
    plan = LayerPlan([patterns[head % len(patterns)] for head in range(4)], 2)
    with torch.no_grad(), as_on_gpu():
        for _ in range(2):
            with counting(run=False) as counts:
                sparse_attention(q, k, v, plan.build(q, k, **where), backend="triton")
    return counts


def decode(chosen: bool, scores: bool, length: int) -> Counts:
    """One token, over all keys or over 64 chosen ones."""
    q = torch.randn(1, 4, 1, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 2, length, 64, dtype=torch.float16) for _ in range(2))
    tokens = torch.arange(64, dtype=torch.int32).expand(1, 2, 64).contiguous() if chosen else None
    with torch.no_grad(), counting(run=False) as counts:
        decode_attention(q, k, v, tokens=tokens, scores="sum" if scores else "none", backend="triton")
    return counts


def scored(length: int) -> Counts:
    """A prompt with the sum of each key's probabilities, as H2O takes it in: the second of its length."""
    q = torch.randn(1, 4, length, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 2, length, 64, dtype=torch.float16) for _ in range(2))
    with torch.no_grad():
        with counting(run=False):
            scored_attention(q, k, v, backend="triton")
        with counting(run=False) as counts:
            scored_attention(q, k, v, backend="triton")
    return counts


def model_step(length: int) -> Counts:
    """One token of a model of three layers with OmniKV: the first is dense, the second chooses, the third follows.

    Its kernels run: what is chosen is read.
    """
    setting = Setting(device="cpu", dtype="float16", small=True)
    loaded, headwise = model.loaded_model(setting), model.sparse_model(setting)
    ids = torch.randint(3, 90, (1, 1))
    with torch.no_grad(), as_on_gpu(), headwise.apply(loaded.model, check_weights=False) as handle:
        cache = handle.new_cache(offload="never")
        fill(loaded.model, cache, length, seed=0)
        loaded.model(ids, past_key_values=cache)
        with counting() as counts:
            loaded.model(ids, past_key_values=cache)
    return counts


def main() -> None:
    """Everything at both lengths."""
    found = {}
    for length in LENGTHS:
        for name in LAYERS:
            found[f"prefill, {name}, {length}"] = asdict(prefill(name, length, pages=False))
            found[f"prefill, {name}, pages, {length}"] = asdict(prefill(name, length, pages=True))
        for name in ("A-shape and dense", "all three"):
            found[f"ragged, {name}, {length}"] = asdict(ragged(name, length))
            # Of lengths that nothing else has asked for.
            found[f"first, {name}, {length}"] = asdict(prefill(name, length + 64, first=True))
        for what, chosen, scores in (
            ("all keys", False, False), ("chosen keys", True, False), ("all keys, scores", False, True),
        ):  # fmt: skip
            found[f"decode, {what}, {length}"] = asdict(decode(chosen, scores, length))
        found[f"prompt, scores, {length}"] = asdict(scored(length))
        found[f"model step, OmniKV, {length}"] = asdict(model_step(length))
    environment = {"torch": torch.__version__, "triton": version("triton"), "device": None}
    print(json.dumps({"environment": environment, "counts": found}, indent=1))


if __name__ == "__main__":
    main()
