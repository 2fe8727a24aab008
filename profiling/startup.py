"""python -m profiling.startup: what serving with an artifact costs before the first token.

The time to load an artifact of many heads, its sidecar included, and what `import runtime` adds to `import torch`, in
fresh processes.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import artifacts
from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command

_IMPORTS = """
import time
started = time.perf_counter()
import torch
between = time.perf_counter()
import runtime
print(between - started, time.perf_counter() - between)
"""
# Names of patterns in an artifact where heads share them, as the search writes it.
_SHARED = 40


@dataclass(frozen=True, kw_only=True)
class StartupConfig:
    """How large a model, and how often to measure; medians are told."""

    layers: int = 80
    heads: int = 64
    repeats: int = 20
    processes: int = 5


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Medians: milliseconds to load, where heads share patterns and where each has its own, and seconds to import."""

    load_ms: float
    load_own_patterns_ms: float
    import_torch_s: float
    import_runtime_s: float


def run(config: StartupConfig) -> Startup:
    """Measure all four.

    Raises:
        HeadwiseError: a size that is none.
    """
    for name, value in asdict(config).items():
        if value < 1:
            raise HeadwiseError(f"--{name} must be at least 1, got {value}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cfg.yaml"
        load = [_load_seconds(config, path, names) for names in (_SHARED, config.layers * config.heads)]
    torch_s, runtime_s = zip(*(_import_seconds() for _ in range(config.processes)), strict=True)
    return Startup(
        load_ms=1000 * load[0],
        load_own_patterns_ms=1000 * load[1],
        import_torch_s=statistics.median(torch_s),
        import_runtime_s=statistics.median(runtime_s),
    )


def example(layers: int, heads: int, names: int) -> artifacts.Artifact:
    """An artifact of that many heads and at most so many patterns, which it uses in turn."""
    count = min(names, layers * heads)
    patterns: dict[str, artifacts.Pattern] = {
        f"vs_{i}": artifacts.VerticalSlash(vertical=1 + i, slash=64 * (1 + i)) for i in range(count)
    }
    rows = tuple(tuple(f"vs_{(layer * heads + head) % count}" for head in range(heads)) for layer in range(layers))
    sha = "0" * 64
    return artifacts.Artifact(
        model=artifacts.ModelInfo(
            name="example",
            architecture="LlamaForCausalLM",
            config_sha256=sha,
            weights_sha256=sha,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=128,
            rope={},
            max_positions=131_072,
        ),
        search=artifacts.SearchInfo(
            tool_version="0",
            command="python -m profiling.startup",
            preset="paper",
            seed=0,
            calibration=artifacts.Calibration(tasks=("text",), lengths=(1,), samples=1, sha256=sha),
            budget="1",
            target_density=1.0,
            device="cpu",
            dtype="float32",
            kernel_backend="reference",
            summary=artifacts.Summary(
                recall=1.0,
                error=0.0,
                density=1.0,
                winners={},
                best_single_kind="vertical_slash",
                best_single_kind_recall=1.0,
            ),
        ),
        patterns=patterns,
        prefill=artifacts.Prefill(dense_below=0, layers=rows),
    )


def _load_seconds(config: StartupConfig, path: Path, names: int) -> float:
    scores = {f"chosen.{name}": np.zeros((config.layers, config.heads), np.float32) for name in ("recall", "density")}
    artifacts.save(example(config.layers, config.heads, names), path, scores)
    seconds = []
    # The first brings the imports along.
    for _ in range(config.repeats + 1):
        started = time.perf_counter()
        artifacts.load_pair(path)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _import_seconds() -> tuple[float, float]:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    torch_s, runtime_s = done.stdout.split()
    return float(torch_s), float(runtime_s)


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json = options.pop("json")
    config = StartupConfig(**options)
    found = run(config)
    size = f"{config.layers} layers x {config.heads} heads"
    lines = [
        f"load {size}, {_SHARED} patterns         {found.load_ms:8.1f} ms",
        f"load {size}, a pattern each     {found.load_own_patterns_ms:8.1f} ms",
        f"import torch                              {found.import_torch_s:8.2f} s",
        f"import runtime, after that                {found.import_runtime_s:8.2f} s",
    ]
    record = {**asdict(config), **asdict(found), "python": platform.python_version(), **_versions()}
    arguments.deliver("\n".join(lines), record, to_json)
    return 0


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "pydantic", "PyYAML", "safetensors")}


def parser() -> ArgumentParser:
    """The command line of python -m profiling.startup."""
    p = ArgumentParser(prog="python -m profiling.startup", description=__doc__)
    p.add_argument("--layers", type=int, default=StartupConfig.layers)
    p.add_argument("--heads", type=int, default=StartupConfig.heads, help="query heads a layer")
    p.add_argument("--repeats", type=int, default=StartupConfig.repeats, help="times to load")
    p.add_argument("--processes", type=int, default=StartupConfig.processes, help="times to import")
    arguments.add_json(p)
    return p


if __name__ == "__main__":
    run_command(main)
