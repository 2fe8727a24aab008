"""Peak memory of a prefill next to the model, in a process of its own.

python -m profiling.memory_use.peak_memory cfg.yaml --model smollm2 --length 8192

`headwise memory` runs it for several lengths and ways of serving. On a GPU the figure is what torch
gave out at most. On Linux it is the growth of the resident set's high-water mark, which is set back
once model and kernels are loaded; elsewhere the mark cannot be set back, and what loading took
hides as much.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from artifacts import Artifact, HeadwiseError, save
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, config_of, option, shared
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.quality.method import Method
from profiling.speed.baselines import KERNEL, MODEL, dense
from runtime import load
from runtime.layers import text_config
from runtime.memory import OFFLOADS, cache_bytes

_WARM = 192
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def _without_arrays(artifact: Artifact) -> Artifact:
    """The artifact as it is served, without what refers to arrays of a sidecar."""
    prefill = artifact.prefill.model_copy(update={"front": None})
    used = {name for row in prefill.layers for name in row or ()}
    patterns = {name: artifact.patterns[name] for name in artifact.patterns if name in used}
    search = artifact.search
    if search is not None:
        calibration = search.calibration.model_copy(update={"seen_windows": 0})
        search = search.model_copy(update={"calibration": calibration, "cost": None})
    return artifact.model_copy(
        update={"prefill": prefill, "patterns": patterns, "search": search, "costs": ()}
    )


def peak_of(
    loaded: LoadedModel, method: Method, length: int, *, spec: str, revision: str | None
) -> int:
    """Bytes that a prefill by the method takes next to the model, keys and values included.

    Args:
        spec, revision: what the model was loaded from, for a process of its own; on a GPU none is
            needed.

    Raises:
        HeadwiseError: that process failed.
    """
    model = loaded.model
    if model.device.type == "cuda":
        with method.apply(model):
            return _grown(model, length, lambda: method.cache(model)).peak
    with tempfile.TemporaryDirectory() as folder:
        config = None
        if method.headwise is not None:
            config = Path(folder) / "cfg.yaml"
            save(_without_arrays(method.headwise.artifact), config)
        dtype = str(model.dtype).removeprefix("torch.")
        own = method.dense == KERNEL
        return peak_apart(
            method.name, spec, length, config=config, own=own, dtype=dtype, revision=revision
        ).peak


class Grown(NamedTuple):
    """Bytes of a prefill next to the model: the peak, and of it the cache on the device."""

    peak: int
    cache: int


def peak_apart(
    name: str,
    spec: str,
    length: int,
    *,
    config: Path | None = None,
    own: bool = False,
    offload: str = "auto",
    dtype: str = "auto",
    device: str = "cpu",
    revision: str | None = None,
) -> Grown:
    """Measure a prefill in a process of its own; `name` stands for it in messages.

    Args:
        config: the artifact to apply; None for dense attention in transformers' own cache, by
            Headwise's kernel with `own`.

    Raises:
        HeadwiseError: that process failed.
    """
    command = [sys.executable, "-m", "profiling.memory_use.peak_memory"]
    command += ["--model", spec, "--length", str(length), "--dtype", dtype, "--device", device]
    command += ["--offload", offload, "--threads", str(torch.get_num_threads())]
    if revision:
        command += ["--revision", revision]
    if config:
        command.append(str(config))
    if own:
        command.append("--own-dense")
    # glibc keeps what it was given back up to 32 MiB a piece: that is of the allocator, not of the
    # prefill.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise HeadwiseError(f"peak memory of {name} could not be measured: {lines[-1]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return Grown(int(result["bytes"]), int(result["cache"]))


@dataclass(frozen=True, kw_only=True)
class OnePrefill:
    """The prefill that is measured in this process; None for threads is torch's own number."""

    model: str = shared(arguments.add_model)
    config: Path | None = shared(
        arguments.add_artifact,
        "artifact to apply; without it attention is dense",
        nargs="?",
        default=None,
    )
    length: int = shared(arguments.add_length, "tokens of the prompt", required=True)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="auto")
    revision: str | None = shared(arguments.add_revision, default=None)
    threads: int | None = option(default=None)
    own_dense: bool = option(
        "without an artifact: dense attention by Headwise's kernel",
        default=False,
        action="store_true",
    )
    offload: str = option(
        "where the cache keeps keys and values",
        default="auto",
        choices=OFFLOADS,
    )


def measure(config: OnePrefill) -> Grown:
    """Measure one prefill of random tokens in this process.

    Raises:
        HeadwiseError: the model cannot be loaded, or the artifact is not for it.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config = settled(config)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        revision=config.revision,
    )
    model = loaded.model
    if config.config is None:
        if config.own_dense:
            baseline = KERNEL
        else:
            baseline = MODEL
        with dense(model, baseline):
            return _grown(model, config.length, lambda: DynamicCache(config=text_config(model)))
    with load(config.config).apply(model, check_weights=False, strict=True) as handle:
        return _grown(model, config.length, lambda: handle.new_cache(offload=config.offload))


@torch.no_grad()
def _grown(model: Any, length: int, cache: Callable[[], Any]) -> Grown:
    """Prefill random tokens and return the growth of memory."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(
        model.device
    )
    # What is loaded or compiled at the first call belongs to no prompt.
    model(ids[:, :_WARM], past_key_values=cache(), use_cache=True, logits_to_keep=1)
    before = _mark(model.device, reset=True)
    filled = cache()
    model(ids, past_key_values=filled, use_cache=True, logits_to_keep=1)
    return Grown(max(0, _mark(model.device, reset=False) - before), cache_bytes(filled).device)


def _mark(device: torch.device, *, reset: bool) -> int:
    """Bytes at most so far, or in use now where the mark is set back to that."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.max_memory_allocated(device))
    if not _STATUS.exists():
        import resource

        if sys.platform == "darwin":
            unit = 1
        else:
            unit = 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if reset:
        try:
            _RESET.write_text("5")
        except OSError as error:
            raise HeadwiseError(
                f"cannot set the high-water mark of memory back: {error.strerror}"
            ) from None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; the last line is JSON."""
    p = ArgumentParser(prog="python -m profiling.memory_use.peak_memory", description=__doc__)
    add_arguments(p, OnePrefill)
    grown = measure(config_of(OnePrefill, vars(p.parse_args(argv))))
    print(json.dumps({"bytes": grown.peak, "cache": grown.cache}))
    return 0


if __name__ == "__main__":
    run_command(main)
