"""The search section: prompts, budget, cost and result of the search."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from artifacts.schema.fields import (
    AtLeast0,
    Count,
    Natural,
    Record,
    Sha256,
    Share,
    Text,
)
from artifacts.schema.patterns import KindName

MAX_WINDOWS = 1 << 20


class Calibration(Record):
    """The prompts that the search looked at."""

    tasks: Annotated[tuple[Text, ...], Field(min_length=1)] = Field(
        description="`kv_retrieval`, `passkey`, `text`, `jsonl` and so on"
    )
    lengths: Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        description="the prompts' lengths, in tokens"
    )
    samples: Count = Field(description="prompts of each task and length")
    sha256: Sha256 = Field(description="over the prompts' token ids")
    seen_windows: Annotated[int, Field(ge=0, le=MAX_WINDOWS)] = Field(
        default=0,
        description=(
            "windows of text that the search has seen, its gates included; "
            "the sidecar has their digests"
        ),
    )


class Summary(Record):
    """Means over searched heads with their patterns, and the heads that each kind won."""

    recall: Share = Field(description="attention mass kept")
    error: AtLeast0 = Field(description="relative L2 distance of the head's output from dense")
    density: Share = Field(description="of the causal area computed, in whole tiles")
    winners: dict[KindName, Natural] = Field(description="heads that each kind won")


class SearchCost(Record):
    """Cost that the search counted: seconds of a device in `costs`, or FLOPs of any."""

    unit: Literal["seconds", "flops"] = Field(
        description="measured seconds of a device, or floating-point operations"
    )
    device: Text = Field(
        description="whose seconds; `costs` has its table. With `flops` where the search ran"
    )


class SearchInfo(Record):
    """Record of the search, enough to repeat it."""

    tool_version: Text = Field(description="of headwise")
    command: Text = Field(description="the command line that wrote this file")
    preset: Literal["paper", "scaled"] = Field(
        description="MInference's own lengths and sizes, or the same scaled to shorter prompts"
    )
    seed: Natural = Field(description="of the calibration prompts")
    calibration: Calibration = Field(description="the prompts that the search looked at")
    allocation: Literal["heads", "model"] = Field(
        default="heads",
        description=(
            "whether the budget is one for each head (MInference 1.0, Algorithm 1) or one for all "
            "heads together"
        ),
    )
    budget: Text = Field(
        description="as it was given: `a_shape:SINK,WINDOW` or a fraction of the dense causal FLOPs"
    )
    target_density: Annotated[Share, Field(gt=0.0)] = Field(
        description="the fraction of the causal area that the budget allows"
    )
    cost: SearchCost | None = Field(
        default=None,
        description="what the search counted as cost; null: tiles, alike for all kinds",
    )
    n_trials: Natural | None = Field(
        default=None, description="Optuna trials behind the result; null: there was no study"
    )
    gradient_fault: Text | None = Field(
        default=None,
        description=(
            "why the loss had no gradients, so that heads were weighed by their change of the "
            "residual stream alone; null: it had, or the search takes none"
        ),
    )
    device: Text = Field(description="where the model ran")
    dtype: Text = Field(description="in which precision it ran")
    kernel_backend: Text = Field(description="the attention kernels that scored the candidates")
    summary: Summary = Field(description="means over the searched heads")
