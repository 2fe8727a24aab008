"""What an application has served and seen, as plain data and as Prometheus' text exposition (format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from artifacts import Artifact
from runtime.attention.state import Settings

if TYPE_CHECKING:
    from runtime.watch import Seen

# How a call was served, by the name that it is counted under; all other names are reasons for dense attention.
_SERVED = {"sparse": "sparse", "chosen": "decode", "kept": "kept"}
# Each metric's name, type and meaning.
_METRICS = (
    ("headwise_calls_total", "counter", "Calls of attention layers by what served them."),
    ("headwise_seconds_total", "counter", "Time of sparse prefills by stage."),
    ("headwise_density", "summary", "Share of the causal area computed, by sequence."),
    ("headwise_recall", "summary", "Attention kept, estimated from the last queries, by sequence."),
    ("headwise_recall_lowest", "gauge", "The lowest estimated recall of a sequence so far."),
    ("headwise_fallbacks_total", "counter", "Sequences served densely for want of recall."),
)


def stats(artifact: Artifact | None, settings: Settings, first_heads: Mapping[int, int]) -> dict[str, Any]:
    """See runtime.Handle.stats."""
    has = (artifact, artifact and artifact.decode, artifact and artifact.kv_cache)
    shown = [name for name, section in zip(_SERVED, has, strict=True) if section is not None]
    result = _calls(settings.calls.total(), shown)
    if settings.decode is not None and (tokens := settings.decode.tokens_read) is not None:
        result["tokens"] = tokens
    if settings.watch is None:
        return result
    seen, calls = settings.watch.read(), settings.calls.by_layer()
    layers = {
        number: {"calls": _calls(calls.get(number, {}), shown), "first_head": first_heads[number]}
        | (_report(seen[number]) if number in seen else {"sequences": 0})
        for number in sorted(first_heads)
    }
    return result | {"layers": layers}


def _calls(counts: Mapping[str, int], shown: Iterable[str]) -> dict[str, Any]:
    dense = {how: count for how, count in counts.items() if how not in _SERVED}
    return {_SERVED[name]: counts.get(name, 0) for name in shown} | {"dense": dense}


def _report(seen: Seen) -> dict[str, Any]:
    heads = seen.heads
    return {
        "sequences": int(max(head.sequences for head in heads)),
        "seconds": seen.seconds,
        "density": [_mean(head.density, head.sequences) for head in heads],
        "skipped": [_mean(head.skipped, head.sequences) for head in heads],
        "recall": [_mean(head.recall, head.known) for head in heads],
        "lowest_recall": [head.lowest if head.known else None for head in heads],
        "fallbacks": [int(head.fallbacks) for head in heads],
    }


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def prometheus(model: str, settings: Settings, first_heads: Mapping[int, int]) -> str:
    """All metrics as text; counters never fall while the artifact is applied. See runtime.Handle.prometheus.

    Raises nothing and leaves out what was never seen; `model` is the first label of every sample.
    """
    lines = {metric: [f"# HELP {metric} {what}", f"# TYPE {metric} {kind}"] for metric, kind, what in _METRICS}

    def add(metric: str, value: float, suffix: str = "", **labels: object) -> None:
        pairs = ",".join(f'{name}="{_escaped(str(label))}"' for name, label in {"model": model, **labels}.items())
        lines[metric].append(f"{metric}{suffix}{{{pairs}}} {value!r}")

    for layer, counts in settings.calls.by_layer().items():
        for how, count in counts.items():
            served, reason = (_SERVED[how], "") if how in _SERVED else ("dense", how)
            add("headwise_calls_total", count, layer=layer, served=served, reason=reason)
    if settings.watch is None:
        return "\n".join(lines["headwise_calls_total"]) + "\n"
    for layer, seen in settings.watch.read().items():
        for stage, seconds in seen.seconds.items():
            add("headwise_seconds_total", seconds, layer=layer, stage=stage)
        for number, head in enumerate(seen.heads, first_heads[layer]):
            at = {"layer": layer, "head": number}
            add("headwise_density", head.density, "_sum", **at)
            add("headwise_density", head.sequences, "_count", **at)
            add("headwise_recall", head.recall, "_sum", **at)
            add("headwise_recall", head.known, "_count", **at)
            if head.known:
                add("headwise_recall_lowest", head.lowest, **at)
            add("headwise_fallbacks_total", head.fallbacks, **at)
    return "\n".join(line for family in lines.values() for line in family) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
