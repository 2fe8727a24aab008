"""What an import loads. Contracts on who may import whom are in pyproject.toml: `make lint`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Needed by some calls only: a serving process imports runtime without them.
HEAVY = {"optuna", "matplotlib", "transformers", "triton", "vllm"}
# Imports in one process after one another, and what none of them has loaded until then.
LAZY = {
    "artifacts.commands.show": {
        "torch",
        "numpy",
        "safetensors",
        "transformers",
        "kernels",
        "runtime",
    },
    # The plugin loads nothing before the engine asks.
    "runtime.vllm": {"torch", "vllm", "transformers"},
    "headwise": {"torch", "transformers", "search", "profiling"},
    "headwise, runtime.attention, runtime.fingerprint": HEAVY | {"profiling", "search"},
}


def test_import_loads_no_more_than_it_needs():
    lines = [
        f"import {modules}\nassert not sys.modules.keys() & {lazy}, {modules!r}"
        for modules, lazy in LAZY.items()
    ]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], cwd=ROOT, check=True)


def test_headwise_exports_the_names_of_other_packages():
    import artifacts
    import headwise
    import runtime

    assert headwise.load is runtime.load and headwise.apply_dense is runtime.apply_dense
    assert headwise.HeadwiseError is artifacts.HeadwiseError and "apply_dense" in dir(headwise)
    assert headwise.__version__ == version("headwise")
