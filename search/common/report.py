"""What a finished search tells its user."""

from __future__ import annotations

from pathlib import Path

from artifacts import Artifact


def print_report(artifact: Artifact, out: Path) -> None:
    """Winners by kind, what the patterns keep and cost, and where the files are."""
    search = artifact.search
    assert search is not None, "a search has just written it"
    summary = search.summary
    heads = sum(summary.winners.values())
    left = sum(row is None for row in artifact.prefill.layers)
    lengths = ", ".join(str(length) for length in search.calibration.lengths)
    print(f"{artifact.model.name}: {heads} heads searched on {', '.join(search.calibration.tasks)} at {lengths} tokens")
    if left:
        print(f"{left} of {artifact.model.num_layers} layers are left alone: they slide already or have no attention")
    for kind, count in summary.winners.items():
        print(f"  {kind:<16}{count:>5}  {count / heads:6.1%}")
    single = summary.best_single_kind
    beside = f"  (best single kind: {single} {summary.best_single_kind_recall:.4f})" if single else ""
    print(f"recall   {summary.recall:.4f}{beside}")
    print(f"density  {summary.density:.4f}  (budget {search.budget}: {search.target_density:.4f})")
    print(f"error    {summary.error:.4f}  (relative L2 of a head's output)")
    for measured in artifact.evidence.measurements if search.allocation == "model" else ():
        print(
            f"{measured.name}: {measured.value:.4g} {measured.unit} ({measured.baseline_name}: {measured.baseline:.4g})"
        )
    if (front := artifact.prefill.front) is not None:
        print(f"{len(front.points)} points to choose from when it is loaded: {front.offers()}")
    print(f"wrote {out}, {artifact.sidecar.file if artifact.sidecar else ''}")
