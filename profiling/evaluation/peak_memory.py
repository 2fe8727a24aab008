"""Peak memory of a prefill next to the model.

On a GPU it is torch's own count. On a CPU it is the growth of the resident set's high-water mark in
a separate process, which reads its input as JSON:

    python -m profiling.evaluation.peak_memory JSON

On Linux the mark is reset once model and kernels are loaded. Elsewhere it cannot be reset, and
hides as much as loading took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from artifacts import Artifact, HeadwiseError, save
from artifacts.cli.command import run_command
from profiling.models.loading import LoadedModel, load_model
from profiling.quality.method import Method
from profiling.speed.baselines import dense
from runtime import load
from runtime.devices import execution_device
from runtime.layers import text_config

_WARM = 192
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_of(
    loaded: LoadedModel, method: Method, length: int, *, spec: str, revision: str | None
) -> int:
    """Bytes that a prefill by the method takes next to the model, keys and values included.

    Args:
        loaded: the model.
        method: the method.
        length: tokens of the prompt.
        spec: the source of the model, for the separate process; a GPU needs none.
        revision: its revision.

    Raises:
        HeadwiseError: that process failed.
    """
    model = loaded.model
    if execution_device(model).type == "cuda":
        with method.apply(model):
            return _growth(model, length, lambda: method.cache(model))
    with tempfile.TemporaryDirectory() as folder:
        config = None
        if method.headwise is not None:
            config = str(Path(folder) / "cfg.yaml")
            save(_without_arrays(method.headwise.artifact), config)
        prefill = {
            "config": config,
            "dense": method.dense,
            "dtype": str(model.dtype).removeprefix("torch."),
            "length": length,
            "model": spec,
            "offload": method.offload,
            "revision": revision,
            "threads": torch.get_num_threads(),
        }
        command = [sys.executable, "-m", __name__, json.dumps(prefill)]
        # glibc keeps freed blocks of up to 32 MiB: those are the allocator's, not the prefill's.
        environment = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise HeadwiseError(f"peak memory of {method.name} could not be measured: {lines[-1]}")
    return int(done.stdout.splitlines()[-1])


def _without_arrays(artifact: Artifact) -> Artifact:
    """The artifact as it is served, without what refers to arrays of a sidecar."""
    prefill = artifact.prefill.model_copy(update={"front": None})
    used = {name for row in prefill.layers for name in row or ()}
    patterns = {name: artifact.patterns[name] for name in artifact.patterns if name in used}
    search = artifact.search
    if search is not None:
        calibration = search.calibration.model_copy(update={"seen_windows": 0})
        search = search.model_copy(update={"calibration": calibration, "cost": None})
    return artifact.model_copy(update={"prefill": prefill, "patterns": patterns, "search": search})


@torch.no_grad()
def _growth(model: Any, length: int, cache: Callable[[], Any]) -> int:
    """Prefill random tokens and return the growth of memory in bytes."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(
        0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0), device="cpu"
    ).to(execution_device(model))
    # Exclude the memory of modules and kernels that the first call loads or compiles.
    model(ids[:, :_WARM], past_key_values=cache(), use_cache=True, logits_to_keep=1)
    before = high_water_mark(execution_device(model), reset=True)
    model(ids, past_key_values=cache(), use_cache=True, logits_to_keep=1)
    return max(0, high_water_mark(execution_device(model), reset=False) - before)


def high_water_mark(device: torch.device, *, reset: bool) -> int:
    """Most bytes in use so far; those in use now if the mark is reset."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.max_memory_allocated(device))
    if not os.path.exists(_STATUS):
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
                f"cannot reset the high-water mark of memory: {error.strerror}"
            ) from None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(argv: list[str] | None = None) -> int:
    """Measure the prefill that the argument describes, and print its bytes."""
    (text,) = argv or sys.argv[1:]
    prefill = json.loads(text)
    torch.set_num_threads(prefill["threads"])
    model = load_model(
        prefill["model"], dtype=prefill["dtype"], device="cpu", revision=prefill["revision"]
    ).model
    length = prefill["length"]
    if prefill["config"] is None:
        with dense(model, prefill["dense"]):
            peak = _growth(model, length, lambda: DynamicCache(config=text_config(model)))
    else:
        with load(prefill["config"]).apply(model, check_weights=False, strict=True) as handle:
            new_cache = partial(handle.new_cache, offload=prefill["offload"])
            peak = _growth(model, length, new_cache)
    print(peak)
    return 0


if __name__ == "__main__":
    run_command(main)
