"""The most memory that a prefill needs beside the model, in a process of its own: what was freed before is no help.

python -m profiling.peak_memory --model smollm2 --config cfg.yaml --length 8192

On a GPU it is what torch gave out at most. On Linux it is the growth of the resident set's high-water mark, which is
set back once model and kernels are loaded; elsewhere the mark cannot be set back, and what loading took hides as much.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from artifacts import HeadwiseError, save
from artifacts.command_line import ArgumentParser, run_command
from profiling.methods import Method
from profiling.models import LoadedModel, load_model
from runtime import load
from runtime.layers import text_config

_WARM = 192
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(loaded: LoadedModel, method: Method, length: int, *, spec: str, revision: str | None) -> int:
    """Bytes that a prefill by the method takes beside the model, keys and values included.

    spec, revision: what the model was loaded from, for a process of its own; on a GPU none is needed.

    Raises:
        HeadwiseError: that process failed.
    """
    model = loaded.model
    if model.device.type == "cuda":
        with method.apply(model):
            return _grown(model, length, lambda: method.cache(model))
    command = [sys.executable, "-m", "profiling.peak_memory", "--model", spec, "--length", str(length)]
    command += ["--dtype", str(model.dtype).removeprefix("torch."), "--threads", str(torch.get_num_threads())]
    command += ["--revision", revision] if revision else []
    with tempfile.TemporaryDirectory() as folder:
        if method.headwise is not None:
            config = Path(folder) / "cfg.yaml"
            save(method.headwise.artifact, config, method.headwise.arrays or None)
            command += ["--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise HeadwiseError(f"peak memory of {method.name} could not be measured: {lines[-1]}")
    return int(json.loads(done.stdout.splitlines()[-1])["bytes"])


def measure(options: argparse.Namespace) -> int:
    """Bytes of one prefill of random tokens in this process."""
    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, dtype=options.dtype, device=options.device, revision=options.revision)
    model = loaded.model
    if options.config is None:
        return _grown(model, options.length, lambda: DynamicCache(config=text_config(model)))
    with load(options.config).apply(model, check_weights=False) as handle:
        return _grown(model, options.length, handle.new_cache)


@torch.no_grad()
def _grown(model: Any, length: int, cache: Callable[[], Any]) -> int:
    """Bytes that a prefill of random tokens takes at most."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    # What is loaded or compiled at the first call belongs to no prompt.
    model(ids[:, :_WARM], past_key_values=cache(), use_cache=True, logits_to_keep=1)
    before = _mark(model.device, reset=True)
    model(ids, past_key_values=cache(), use_cache=True, logits_to_keep=1)
    return max(0, _mark(model.device, reset=False) - before)


def _mark(device: torch.device, *, reset: bool) -> int:
    """Bytes at most so far, or in use now where the mark is set back to that."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.max_memory_allocated(device))
    if not _STATUS.exists():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if reset:
        try:
            _RESET.write_text("5")
        except OSError as error:
            raise HeadwiseError(f"cannot set the high-water mark of memory back: {error.strerror}") from None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; the last line is JSON."""
    p = ArgumentParser(prog="python -m profiling.peak_memory", description=__doc__)
    p.add_argument("--model", required=True, help="hub id, local folder, GGUF file, smollm2 or gemma3")
    p.add_argument("--config", type=Path, help="artifact to apply; without it attention is dense")
    p.add_argument("--length", required=True, type=int, help="tokens of the prompt")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--device", default="cpu")
    p.add_argument("--revision", help="revision of a hub model")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    print(json.dumps({"bytes": measure(p.parse_args(argv))}))
    return 0


if __name__ == "__main__":
    run_command(main)
