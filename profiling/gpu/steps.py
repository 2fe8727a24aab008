"""What python -m profiling.gpu_report does, step by step, in the order of what each is worth when time is short.

A step is a module with `pieces(step, setting)`, the names of what it does in the order of their worth, and
`run(piece, setting)`, which does one and returns JSON. `lines(rows)` makes of what the pieces returned a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

# What the pieces of a step have returned, by their names.
Rows = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every piece is told: the device and the number format by torch's names.

    small: sizes that Triton's interpreter serves in a moment. model, artifact: of the steps that want real ones.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    small: bool = False
    model: str | None = None
    artifact: str | None = None


class StepModule(Protocol):
    """What a step's module has."""

    def pieces(self, step: str, setting: Setting) -> list[str]:
        """Names of the step's pieces, those of the most worth first."""

    def run(self, piece: str, setting: Setting) -> dict[str, Any]:
        """Do one piece; what it found, as JSON."""

    def lines(self, rows: Rows) -> list[Sequence[str]]:
        """A table of what was found, its header first."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """module: its full name. seconds: the longest that a piece may take. workers: processes that share its pieces.

    compiles: without a device, in processes of its own, which a rehearsal leaves free of Triton's interpreter.
    """

    name: str
    title: str
    module: str
    seconds: float
    workers: int = 1
    compiles: bool = False

    def load(self) -> StepModule:
        """The step's module."""
        return import_module(self.module)


STEPS = (
    Step(name="device", title="The device", module="profiling.gpu.device", seconds=60),
    Step(name="check", title="Self-check: every kernel once", module="profiling.gpu.self_check", seconds=90, workers=8),
    Step(
        name="core",
        title="Each sort of call against the reference",
        module="profiling.gpu.pytest_files",
        seconds=120,
        workers=12,
    ),
    # Head dim 128, which all that is timed after it has; what is the fastest serves there.
    Step(name="builds", title="Builds compiled for the sweep", module="profiling.gpu.sweep", seconds=90, workers=12),
    Step(name="sweep", title="Sweep of the launch table", module="profiling.gpu.sweep", seconds=45),
    Step(name="attention", title="Attention, the published sizes", module="profiling.gpu.attention", seconds=90),
    Step(name="decode", title="Decode: one token's attention", module="profiling.gpu.decode", seconds=60),
    Step(
        name="conformance",
        title="Kernels against the reference on this device",
        module="profiling.gpu.pytest_files",
        seconds=240,
        workers=12,
    ),
    Step(
        name="predicted",
        title="The builds, and what they reach at most",
        module="profiling.gpu.builds",
        seconds=120,
        workers=12,
        compiles=True,
    ),
    Step(name="model", title="An 8B shape from end to end", module="profiling.gpu.model", seconds=150),
    Step(
        name="tests", title="Other tests that need a GPU", module="profiling.gpu.pytest_files", seconds=120, workers=6
    ),
    Step(name="other builds", title="Builds of other head dims", module="profiling.gpu.sweep", seconds=90, workers=12),
    Step(name="other sweep", title="Sweep of other head dims", module="profiling.gpu.sweep", seconds=45),
    Step(name="long", title="Attention at 256K to 1M tokens", module="profiling.gpu.attention", seconds=180),
    Step(name="others", title="FlexAttention, FlashInfer and vLLM", module="profiling.gpu.attention", seconds=150),
    Step(name="costs", title="The cost table of a search", module="profiling.gpu.commands", seconds=240),
    Step(name="commands", title="A model of your own", module="profiling.gpu.commands", seconds=600),
)
