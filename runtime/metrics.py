"""What an application has served and seen, as plain data and as Prometheus' text exposition (format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from artifacts import Artifact
from runtime.attention.state import Settings

if TYPE_CHECKING:
    from runtime.watch import Seen

# How a call was served, by the name that it is counted under; all other names are reasons for dense attention.
_SERVED = {"sparse": "sparse", "chosen": "decode", "kept": "kept"}


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
    return {
        "sequences": int(max(seen.sequences, default=0)),
        "seconds": seen.seconds,
        "density": _means(seen.density, seen.sequences),
        "skipped": _means(seen.skipped, seen.sequences),
        "recall": _means(seen.recall, seen.known),
        "lowest_recall": [low if low < inf else None for low in seen.lowest],
        "fallbacks": [int(count) for count in seen.fallbacks],
    }


def _means(sums: list[float], counts: list[float]) -> list[float | None]:
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


class _Metric(NamedTuple):
    """A family of samples: its name, type and meaning, and each sample's suffix, labels and value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, dict[str, object], float]]

    def add(self, value: float, labels: dict[str, object], suffix: str = "") -> None:
        self.samples.append((suffix, labels, value))


def prometheus(model: str, settings: Settings, first_heads: Mapping[int, int]) -> str:
    """All metrics as text; counters never fall while the artifact is applied. See runtime.Handle.prometheus.

    Raises nothing and leaves out what was never seen; `model` is the first label of every sample.
    """
    calls = _Metric("headwise_calls_total", "counter", "Calls of attention layers by what served them.", [])
    for layer, counts in settings.calls.by_layer().items():
        for how, count in counts.items():
            served = _SERVED.get(how, "dense")
            reason = "" if how in _SERVED else how
            calls.add(count, {"model": model, "layer": layer, "served": served, "reason": reason})
    metrics = [calls]
    if settings.watch is not None:
        metrics += _seen(model, settings.watch.read(), first_heads)
    return "".join(_lines(metric) for metric in metrics)


def _seen(model: str, seen: Mapping[int, Seen], first_heads: Mapping[int, int]) -> list[_Metric]:
    stages = _Metric("headwise_seconds_total", "counter", "Time of sparse prefills by stage.", [])
    density = _Metric("headwise_density", "summary", "Share of the causal area computed, by sequence.", [])
    recall = _Metric("headwise_recall", "summary", "Attention kept, estimated from the last queries, by sequence.", [])
    lowest = _Metric("headwise_recall_lowest", "gauge", "The lowest estimated recall of a sequence so far.", [])
    fallbacks = _Metric("headwise_fallbacks_total", "counter", "Sequences served densely for want of recall.", [])
    for layer, found in seen.items():
        for stage, seconds in found.seconds.items():
            stages.add(seconds, {"model": model, "layer": layer, "stage": stage})
        for at in range(len(found.sequences)):
            labels: dict[str, object] = {"model": model, "layer": layer, "head": first_heads[layer] + at}
            density.add(found.density[at], labels, "_sum")
            density.add(found.sequences[at], labels, "_count")
            recall.add(found.recall[at], labels, "_sum")
            recall.add(found.known[at], labels, "_count")
            if found.known[at]:
                lowest.add(found.lowest[at], labels)
            fallbacks.add(found.fallbacks[at], labels)
    return [stages, density, recall, lowest, fallbacks]


def _lines(metric: _Metric) -> str:
    lines = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
    for suffix, labels, value in metric.samples:
        pairs = ",".join(f'{name}="{_escaped(str(label))}"' for name, label in labels.items())
        lines.append(f"{metric.name}{suffix}{{{pairs}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
