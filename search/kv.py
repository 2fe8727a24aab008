"""headwise kv: choose how many tokens each KV head keeps, for a total, and write the artifact.

    headwise kv cfg.yaml --model smollm2 --out cfg.yaml --target-share 0.2
    headwise kv cfg.yaml --model smollm2 --out cfg.yaml --target-bytes 64MiB --context 8192

Heads that need few tokens leave more to the others. Each head's curve of error against budget is
measured (profiling.caches.budget_curves), the total is spent exactly, and the result is compared
with the same total spent evenly, on held-out prompts; where it is not better beyond chance, even is
written. Other prompts report.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from artifacts.cli.arguments import Json, deliver
from search.decode.kv_search import KVResult, KVSearch
from search.decode.kv_search import run as find_budgets


class Config(KVSearch):
    """The search, and where its figures go."""

    as_json: Json = None


def run(config: Config) -> int:
    """Search, and print the report."""
    _, result = find_budgets(config)
    then = f"headwise evaluate {config.out} --model {config.model} --out report/"
    text = (
        f"{report(result)}\nwrote {config.out} ({config.command})\n"
        f"next, compare with other caches: {then}"
    )
    deliver(text, {"command": config.command, **record(result)}, config.as_json)
    return 0


def record(result: KVResult) -> dict[str, Any]:
    """The figures of the report as plain data."""
    scores = {"searched": result.searched, "even": result.even}
    return {
        "share": result.share,
        "budgets": _budgets(result),
        "better": result.better,
        "held_out": {
            name: {"kl": score.mean_kl, "perplexity_ratio": score.perplexity_ratio}
            for name, score in scores.items()
        },
    }


def _budgets(result: KVResult) -> dict[str, int]:
    """Number of heads by the name of their policy."""
    heads = result.curves.error.shape[1]
    rows = (
        result.section.heads(layer, heads)
        for layer, row in enumerate(result.section.layers)
        if row is not None
    )
    counts = Counter(name for row in rows for name in row or ())
    return {name: counts[name] for name in result.section.policies}


def report(result: KVResult) -> str:
    """The budgets chosen, and their losses next to the same total spent evenly."""
    budgets = ", ".join(f"{name} x{count}" for name, count in _budgets(result).items())
    lines = [
        f"{result.share:.4f} of all tokens are retained, by {budgets}",
        "held-out prompts that decided nothing, against a full cache:",
        f"  searched   KL {result.searched.mean_kl:.5f}  perplexity "
        f"{100 * (result.searched.perplexity_ratio - 1):+.2f}%",
        f"  even       KL {result.even.mean_kl:.5f}  perplexity "
        f"{100 * (result.even.perplexity_ratio - 1):+.2f}%",
    ]
    if not result.better:
        lines.append(
            "the even budgets are written: the searched ones were not better beyond chance on the "
            "held-out prompts that decide (more --samples may show it)"
        )
    return "\n".join(lines)
