"""The page of a GPU report, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from profiling.gpu.builds import beside_measured
from profiling.gpu.sweep import timed


def page(record: Mapping[str, Any]) -> str:
    """Device and versions, what went wrong, and a table for each step."""
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    facts = record["environment"]
    yield f"# Headwise on {facts['device']}"
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None and name != "device")
    yield f"\n`{record['command']}`"
    if record["setting"]["small"]:
        yield "\nA rehearsal in Triton's interpreter: results are compared as on a GPU, times mean nothing."
    failed = [(name, *each) for name, step in record["steps"].items() for each in step["failed"].items()]
    yield f"\n**{len(failed)} pieces failed.**" if failed else "\nNothing failed."
    for name, piece, error in failed:
        yield f"- {name}, {piece}: `{' '.join(error.split())[:300]}`"
    rows = {name: step["rows"] for name, step in record["steps"].items()}
    product = rows.get("device", {}).get("product", {}).get("rate")
    known = beside_measured(rows.get("predicted", {}), timed(record["steps"]), product)
    if len(known) > 1:
        yield "\n## What the time model allows at most, and what was measured\n"
        yield from markdown(known)
    for name, step in record["steps"].items():
        yield f"\n## {step['title']}\n"
        yield from markdown(step["table"])
        if step["not_run"]:
            yield f"\nNot run for want of time: {', '.join(step['not_run'][:8])}{' ...' * (len(step['not_run']) > 8)}"
        if name == "sweep" and record.get("table"):
            yield "\nWhat to put into kernels/attention/triton_launch.py:\n"
            yield "```python\n" + "\n".join(record["table"]["lines"]) + "\n```"


def markdown(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table whose first line is its header, in Markdown; what is no text stands to the right."""
    if not table:
        yield "nothing measured"
        return
    yield f"| {' | '.join(table[0])} |"
    yield "|---" * len(table[0]) + "|"
    for line in table[1:]:
        yield f"| {' | '.join(line)} |"
