"""The search section: prompts, budget, cost and result of the search."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from artifacts.schema.fields import (
    AtLeast0,
    Count,
    Items,
    Natural,
    Positive,
    Record,
    Sha256,
    Share,
    Text,
)
from artifacts.schema.patterns import KindName

MAX_WINDOWS = 1 << 20
CostUnit = Literal["seconds", "flops"]


class Calibration(Record):
    """Calibration prompts of the search."""

    tasks: Annotated[Items[Text], Field(min_length=1)] = Field(
        description="`kv_retrieval`, `passkey`, `text`, `jsonl` and so on"
    )
    length: Count = Field(description="tokens of a prompt")
    samples: Count = Field(description="prompts of each task")
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

    @property
    def tiles(self) -> str:
        """Describe the density."""
        return f"density {self.density:.3f} of tiles"


def share_of_dense(share: float, unit: CostUnit) -> str:
    """Describe a cost relative to dense attention with the same kernels."""
    name = {"seconds": "seconds", "flops": "operations"}[unit]
    return f"{share:.3f} of dense attention's {name}"


class SearchCost(Record):
    """Cost that the search counted: seconds of a device, or FLOPs of any."""

    unit: CostUnit = Field(description="measured seconds of a device, or floating-point operations")
    device: Text = Field(description="whose seconds; with `flops` where the search ran")


class SearchInfo(Record):
    """Record of the search, enough to repeat it."""

    tool_version: Text = Field(description="of headwise")
    command: Text = Field(description="the command line that wrote this file")
    preset: Literal["paper", "scaled"] = Field(
        description="MInference's own lengths and sizes, or the same scaled to shorter prompts"
    )
    seed: Natural = Field(description="of the calibration prompts")
    calibration: Calibration = Field(description="calibration prompts of the search")
    allocation: Literal["heads", "model"] = Field(
        default="heads",
        description=(
            "whether the budget is one for each head (MInference 1.0, Algorithm 1) or one for all "
            "heads together"
        ),
    )
    budget: Text = Field(
        description=(
            "as asked for: `a_shape:SINK,WINDOW`, or a fraction of dense attention's cost by the "
            "same kernels"
        )
    )
    spent: Positive = Field(
        description=(
            "what the patterns cost, as a fraction of dense attention's cost; more than `budget` "
            "where the gate raised it"
        )
    )
    cost: SearchCost | None = Field(
        default=None,
        description="what the search counted as cost; null: tiles, alike for all kinds",
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

    @property
    def spending(self) -> str:
        """Describe the requested budget and the spent part."""
        suffix = ""
        if self.allocation == "heads":
            suffix = " for each head"
        unit: CostUnit = "flops"
        if self.cost is not None:
            unit = self.cost.unit
        return f"budget asked {self.budget}{suffix}, spent {share_of_dense(self.spent, unit)}"
