"""The search section: prompts, budget, cost and result of the search."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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
MAX_FRONTIER = 32
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

    recall: Share | None = Field(
        description="attention mass kept; null: not measured on these weights"
    )
    error: AtLeast0 | None = Field(
        description=(
            "relative L2 distance of the head's output from dense; null: not measured on these "
            "weights"
        )
    )
    density: Share = Field(description="of the causal area computed, in whole tiles")
    winners: dict[KindName, Natural] = Field(description="heads that each kind won")

    @property
    def tiles(self) -> str:
        """Describe the density."""
        return f"density {self.density:.3f} of tiles"

    @property
    def means(self) -> list[str]:
        """Describe recall, density and error, as far as they were measured on the weights."""
        means = []
        if self.recall is not None:
            means.append(f"recall {self.recall:.4f}")
        means.append(self.tiles)
        if self.error is not None:
            means.append(f"error {self.error:.4f} (relative L2 of a head's output)")
        return means


def share_of_dense(share: float, unit: CostUnit) -> str:
    """Describe a cost relative to dense attention with the same kernels."""
    name = {"seconds": "seconds", "flops": "operations"}[unit]
    return f"{share:.3f} of dense attention's {name}"


class SearchCost(Record):
    """Cost that the search counted: seconds of a device, or FLOPs of any."""

    unit: CostUnit = Field(description="measured seconds of a device, or floating-point operations")
    device: Text = Field(description="whose seconds; with `flops` where the search ran")


class FrontierPoint(Record):
    """A budget with the loss and the time that the search predicts for it, or has measured."""

    spent: Positive = Field(description="cost, as a fraction of dense attention's")
    seconds: Positive | None = Field(
        default=None, description="to the first token; null where FLOPs were counted"
    )
    lost: float | None = Field(
        default=None, description="fraction of dense attention's correct answers that is lost"
    )
    lost_high: float | None = Field(
        default=None, description="upper bound at 95% confidence; null: `lost` is predicted"
    )
    perplexity: float | None = Field(default=None, description="relative rise of the perplexity")
    measured: bool = Field(description="whether the losses are measured, on held-out prompts")

    @model_validator(mode="after")
    def _predicted(self) -> Self:
        if not self.measured and self.lost_high is not None:
            raise ValueError("lost_high goes with measured: true")
        return self


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
    budget: Text | None = Field(
        default=None,
        description=(
            "as asked for: `a_shape:SINK,WINDOW`, or a fraction of dense attention's cost by the "
            "same kernels; null: the least whose losses are proven to be within the limits"
        ),
    )
    spent: Positive = Field(
        description="what the patterns cost, as a fraction of dense attention's cost"
    )
    frontier: Annotated[Items[FrontierPoint], Field(max_length=MAX_FRONTIER)] = Field(
        default=(), description="budgets with their times and losses, the cheapest first"
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
        spent = f"spent {share_of_dense(self.spent, unit)}"
        if self.budget is None:
            return f"budget {spent}, set by the limits"
        return f"budget asked {self.budget}{suffix}, {spent}"
