"""An artifact as a page of text for a terminal of 80 columns or more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING

from artifacts.errors import number, plural
from artifacts.page import search
from artifacts.page.layout import aligned, cell, labelled
from artifacts.schema.artifact import Artifact
from artifacts.schema.evidence import Evidence, PromptSet, TaskFigures
from artifacts.schema.patterns import RECORDS

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

LEFT_ALONE = "."
# Heads that do not fit on the line of the means are wrapped.
_MAP_HEADS = 48
_MAP_WRAP = 32
_MEANS = ("recall", "error", "density")


def render(
    artifact: Artifact, *, file: str, arrays: Mapping[str, Array], sidecar: str, width: int = 96
) -> str:
    """The page that `headwise show` prints.

    Args:
        artifact: artifact to show.
        file: name of the YAML file, for the first line.
        arrays: arrays of the sidecar. The page shows the mean of each layer for chosen.recall,
            chosen.error and chosen.density of shape (layers, heads), or else of imported recalls.
        sidecar: line on the state of the sidecar.
        width: maximum width of sentences in columns.
    """
    parts = [
        _head(artifact, file, sidecar, width),
        search.front(artifact),
        _winners(artifact),
        _map(artifact, arrays),
        _evidence(artifact.evidence, width),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head(artifact: Artifact, file: str, sidecar: str, width: int) -> list[str]:
    model = artifact.model
    if model.revision:
        revision = f" at {model.revision}"
    else:
        revision = ""
    shape = (
        f"{model.num_layers} layers of {model.num_heads} query and {model.num_kv_heads} KV heads"
    )
    facts = f"head dim {model.head_dim}, {model.max_positions:,} positions"
    if model.weights_sha256:
        unknown = ""
    else:
        unknown = "; not compared with any weights"
    rows = [
        ("artifact", f"{file} (schema {artifact.schema_version}, written {artifact.created_at})"),
        ("content", artifact.content_sha256),
        ("sidecar", sidecar),
        (
            "model",
            f"{model.name}{revision}, {model.architecture or 'some architecture'}: {shape}, "
            f"{facts}{unknown}",
        ),
        *search.origin(artifact),
        *search.lengths(artifact),
    ]
    rows += [("decode" * (i == 0), text) for i, text in enumerate(_decode(artifact))]
    rows += [("KV cache" * (i == 0), text) for i, text in enumerate(_kv_cache(artifact))]
    return [line for label, text in rows for line in labelled(label, text, width)]


def _decode(artifact: Artifact) -> Iterator[str]:
    if artifact.decode is None:
        return
    omnikv = artifact.decode.omnikv
    if isinstance(omnikv.budget, int):
        budget = f"{omnikv.budget:,} tokens"
    else:
        budget = f"{omnikv.budget:.1%} of the context"
    selector: str = omnikv.selector
    if selector != "last":
        selector += f" over {omnikv.window} queries"
    dense = ""
    if omnikv.dense_layers:
        dense = f"; dense {', '.join(map(str, omnikv.dense_layers))}"
    yield (
        f"OmniKV: filter layers {', '.join(map(str, omnikv.filter_layers))}{dense}; {budget}, "
        f"selector {selector}"
    )
    if omnikv.prefill_ratio is not None:
        yield (
            f"chunked prefill: {omnikv.prefill_ratio:g} tokens of the "
            f"past for each token of the chunk"
        )
    if similarity := omnikv.similarity:
        yield (
            f"keeps {similarity.kept:.4f} of the attention mass on held-out prompts "
            f"({', '.join(similarity.tasks)}); evenly spaced {similarity.evenly_spaced:.4f}"
        )
        if similarity.error is not None:
            yield f"error {similarity.error:.5f}"


def _kv_cache(artifact: Artifact) -> Iterator[str]:
    if artifact.kv_cache is None:
        return
    heads = [
        artifact.kv_cache.heads(layer, artifact.model.num_kv_heads)
        for layer in range(artifact.model.num_layers)
    ]
    counts = Counter(name for names in heads for name in names or ())
    for name, policy in artifact.kv_cache.policies.items():
        sizes = ", ".join(f"{field} {value}" for field, value in policy if field != "kind")
        if sizes:
            of = " of "
        else:
            of = ""
        yield f"{name}: {policy.kind}{of}{sizes}; {plural(counts[name], 'KV head')}"
    if imported := artifact.kv_cache.imported:
        yield f"imported from {imported.file}, {imported.format}, {imported.sha256[:12]}"


def _winners(artifact: Artifact) -> list[str]:
    by_kind: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in (name for row in artifact.prefill.layers for name in row or ()):
        by_kind[artifact.patterns[name].kind][name] += 1
    if not by_kind:
        return []
    total = sum(counts.total() for counts in by_kind.values())
    rows = [["kind", "heads", "share", "patterns"]]
    for kind, counts in sorted(by_kind.items(), key=lambda pair: (-pair[1].total(), pair[0])):
        common = ", ".join(f"{name} x{count}" for name, count in counts.most_common(2))
        if len(counts) > 2:
            more = f", {len(counts) - 2} more"
        else:
            more = ""
        rows.append([kind, str(counts.total()), f"{counts.total() / total:.1%}", common + more])
    if artifact.search:
        title = "winners by kind"
    else:
        title = "heads by kind"
    return [
        title,
        *aligned(rows, left=(0, 3), indent=2),
    ]


def _map(artifact: Artifact, arrays: Mapping[str, Array]) -> list[str]:
    used = {artifact.patterns[name].kind for row in artifact.prefill.layers for name in row or ()}
    legend = ", ".join(f"{cls.letter} {kind}" for kind, cls in RECORDS.items() if kind in used)
    heads = artifact.model.num_heads
    label = "query heads"
    if heads <= _MAP_HEADS:
        per_line = heads
    else:
        per_line = _MAP_WRAP
    column = max(per_line, len(label))
    means = {
        name: array
        for name in _MEANS
        if (array := arrays.get(f"chosen.{name}")) is not None
        and array.shape == (artifact.model.num_layers, heads)
    }
    scores = arrays.get("imported.score")
    imported = artifact.prefill.imported
    recalls = imported is not None and imported.scores == "recall"
    fits = scores is not None and scores.shape == (artifact.model.num_layers, heads)
    if not means and recalls and fits:
        means = {"recall": arrays["imported.score"]}
    lines = [f"map: {', '.join(filter(None, (legend, f'{LEFT_ALONE} slides already')))}"]
    lines.append(f"  layer  {label:{column}}" + "".join(f"{name:>9}" for name in means))
    for layer, row in enumerate(artifact.prefill.layers):
        if row:
            letters = "".join(artifact.patterns[name].letter for name in row)
        else:
            letters = LEFT_ALONE * heads
        first, *rest = (letters[i : i + per_line] for i in range(0, heads, per_line))
        tail = "".join(_mean(array[layer].tolist()) for array in means.values())
        lines.append(f"  {layer:>5}  {first:{column}}{tail}".rstrip())
        lines += [f"         {more}" for more in rest]
    return lines


def _mean(values: Sequence[float]) -> str:
    scored = [value for value in values if not isnan(value)]
    if scored:
        return f"{sum(scored) / len(scored):>9.4f}"
    return f"{'-':>9}"


def _evidence(evidence: Evidence, width: int) -> list[str]:
    if not evidence:
        return ["evidence: none measured yet"]
    lines = ["evidence"]
    if evidence.verdict is not None:
        lines += labelled("  verdict", evidence.proof, width, indent=15)
    for label, prompts in (
        ("chosen on", evidence.chosen_on),
        ("reported on", evidence.reported_on),
    ):
        if prompts is not None:
            lines += labelled(f"  {label}", _prompts(prompts), width, indent=15)
    rows = [["task", "length", "prompts", "kl", "answer nll", "(95%)", "accuracy", "perplexity"]]
    for task in evidence.tasks:
        low = task.nll_rise_low
        high = task.nll_rise_high
        if low is None or high is None:
            interval = "-"
        else:
            interval = f"{low:+.4f} to {high:+.4f}"
        figures = [
            cell(task.length, ","),
            str(task.prompts),
            f"{task.kl:.4g}",
            cell(task.nll_rise, "+.4f"),
            interval,
        ]
        rows.append([task.task, *figures, _accuracy(task), cell(task.perplexity_ratio, ".4f", "x")])
    if evidence.tasks:
        lines += aligned(rows, indent=2)
    rows = [["measured", "value", "baseline", "", "length", "samples"]]
    for m in evidence.measurements:
        values = [
            "-" if value is None else f"{number(value)} {m.unit}".strip()
            for value in (m.value, m.baseline)
        ]
        rows.append([m.name, *values, m.baseline_name or "", cell(m.length, ","), cell(m.samples)])
    if evidence.measurements:
        lines += aligned(rows, left=(0, 3), indent=2)
    # Most entries share a command and a machine, which are printed only once.
    for command in dict.fromkeys(m.command for m in evidence.measurements):
        lines += labelled("", f"$ {command}", width, indent=2)
    for device, versions in dict.fromkeys(
        (m.device, tuple(sorted(m.versions.items()))) for m in evidence.measurements
    ):
        lines += labelled(
            "", ", ".join([f"on {device}", *(f"{k} {v}" for k, v in versions)]), width, indent=2
        )
    return lines


def _accuracy(task: TaskFigures) -> str:
    """Accuracy of dense attention and of the artifact, and the number of questions."""
    if task.dense_right is None or task.lost is None or task.won is None:
        return "-"
    return f"dense {task.dense_accuracy:.2f}, artifact {task.accuracy:.2f} of {task.num_answers:,}"


def _prompts(prompts: PromptSet) -> str:
    return f"{prompts.name}, {plural(prompts.prompts, 'prompt')}, {prompts.sha256[:12]}"
