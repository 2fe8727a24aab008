"""headwise filters: choose the layers that filter in decode and those that stay dense.

The similarity of layers is measured on a few prompts (or read with --profile). The filter and dense
layers with the least change of the sparse layers' part of the residual stream are found exactly. On
other prompts the choice is compared with evenly spaced filter layers. The artifact's other sections
stay as they are.

    headwise filters cfg.yaml --model smollm2 --out cfg.yaml --task kv_retrieval
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artifacts.cli.arguments import Json, deliver
from search.decode.filter_search import FilterResult, FilterSearch
from search.decode.filter_search import run as find_filters


class Config(FilterSearch):
    """The search, and where its figures go."""

    as_json: Json = None


def run(config: Config) -> int:
    """Search, and print the report."""
    _, result = find_filters(config)
    then = f"next: headwise decode {config.out} --model {config.model}"
    text = f"{report(result)}\nwrote {config.out}\n{then}"
    deliver(text, {"command": config.command, **record(result)}, config.as_json)
    return 0


def record(result: FilterResult) -> dict[str, Any]:
    """The figures of the report as plain data, with the settings that they hold for."""
    about = result.profile.about
    scores = {"chosen_on": result.made_by, "held_out": result.held_out}
    scores["evenly_spaced"] = result.even
    figures = {}
    for name, score in scores.items():
        figures[name] = {
            "kept": score.kept,
            "error": score.error,
            "filter_layers": score.choice.filter_layers,
            "dense_layers": score.choice.dense_layers,
        }
    settings = ("model", "length", "steps", "samples", "top_k", "dtype")
    return {
        "scores": figures,
        "settings": {name: about[name] for name in settings},
        "tasks": about["tasks"],
        "versions": about["versions"],
    }


def report(result: FilterResult) -> str:
    """The choice, its mass kept and error, next to evenly spaced filter layers."""
    choice = result.choice
    n = len(result.profile.layers)
    even = named(result.even.choice.filter_layers)
    rows = (
        ("chosen on", result.made_by, ""),
        ("held-out prompts", result.held_out, ""),
        ("evenly spaced", result.even, f"  ({even})"),
    )
    lines = [
        f"filter layers {named(choice.filter_layers)}; dense {named(choice.dense_layers)}; "
        f"{n - choice.full} of {n} full-attention layers are sparse",
        f"with the top {result.profile.about['top_k']} tokens of all heads together",
        f"{'':<27}kept       error",
    ]
    for name, score, note in rows:
        lines.append(f"  {name:<21}{score.kept:8.4f}{score.error:12.5f}{note}")
    lines.append(
        "kept: attention mass, mean over the layers; error: squared change of the sparse layers' "
        "outputs relative to the residual stream, summed"
    )
    return "\n".join(lines)


def named(layers: Sequence[int]) -> str:
    """Layers with commas between."""
    return ", ".join(map(str, layers)) or "none"
