"""What was chosen for decode, on the prompts that chose and on held-out ones, and what is said of
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from profiling.similarities.similarity_profile import Profile
from search.decode.filter_layers import Choice


@dataclass(frozen=True, kw_only=True)
class Score:
    """A choice on some prompts: mean attention mass kept, and summed errors."""

    choice: Choice
    kept: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """The choice on the prompts it was made by, and it and evenly spaced filter layers on held-out
    ones."""

    made_by: Score
    held_out: Score
    even: Score
    profile: Profile

    @property
    def choice(self) -> Choice:
        return self.made_by.choice


def record(found: Found) -> dict[str, Any]:
    """The figures of the report as plain data, with what they were measured on."""
    scores = {"chosen_on": found.made_by, "held_out": found.held_out, "evenly_spaced": found.even}
    about = found.profile.about
    return {
        "scores": {
            name: {
                "kept": score.kept,
                "error": score.error,
                "filter_layers": score.choice.filter_layers,
                "dense_layers": score.choice.dense_layers,
            }
            for name, score in scores.items()
        },
        "settings": {
            name: about[name] for name in ("model", "length", "steps", "samples", "top_k", "dtype")
        },
        "tasks": about["tasks"],
        "versions": about["versions"],
    }


def report(found: Found) -> str:
    """What was chosen, what it keeps of attention and changes, beside what it is compared with."""
    choice = found.choice
    n = len(found.profile.layers)
    scores = {
        "chosen on": found.made_by,
        "held-out prompts": found.held_out,
        "evenly spaced": found.even,
    }
    lines = [
        f"filter layers {named(choice.filter_layers)}; dense {named(choice.dense_layers)}; "
        f"{n - choice.full} of {n} full-attention layers are sparse",
        f"with the top {found.profile.about['top_k']} tokens of all heads together",
        f"{'':<27}kept       error",
    ]
    for what, score in scores.items():
        note = f"  ({named(score.choice.filter_layers)})" if score is found.even else ""
        lines.append(f"  {what:<21}{score.kept:8.4f}{score.error:12.5f}{note}")
    lines.append(
        "kept: attention mass, mean over the layers; error: squared change of the sparse layers' "
        "outputs relative to "
        "the residual stream, summed"
    )
    return "\n".join(lines)


def named(layers: Sequence[int]) -> str:
    """Layers with commas between."""
    return ", ".join(map(str, layers)) or "none"
