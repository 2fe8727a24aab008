"""What `headwise gate --out` keeps of a searched artifact, on its weights and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import artifacts
from artifacts import Evidence, Front, HeadwiseError, Point, PromptSet, Verdict
from artifacts.store.windows import seen_windows
from headwise.__main__ import main
from profiling.models.loading import load_model
from runtime import load
from search.model.transfer import with_bound, write_for
from tests.search.model.conftest import LENGTH

# Pointless searches of a random model have no bound of answers.
PROVEN: dict[str, Any] = {"proven": True, "contexts": 16, "lost": 0.1, "max_lost": 0.2}
VERDICT = Verdict(**PROVEN, lost_high=0.15)
OTHERS = PromptSet(name="by which the budget was chosen", prompts=4, sha256="1" * 64)


def front(*lost: float | None, served: int = 1) -> Front:
    """Points with these bounds, the cheapest first."""
    points = tuple(
        Point(
            cost=1.0 + at,
            speedup=4.0 / (1 + at),
            kl=1.0 / (1 + at),
            recall=0.9,
            density=0.5,
            lost=each,
            layers=None if at == served else (("a",),),
        )
        for at, each in enumerate(lost)
    )
    return Front(length=LENGTH, unit="flops", dense_cost=4.0, measured_on="held_out", points=points)


@pytest.mark.parametrize(
    ("old", "high", "new"),
    [
        ((0.05, 0.01, 0.002), 0.15, (0.75, 0.15, 0.03)),
        ((0.05, 0.01, 0.002), -0.01, (0.0, -0.01, 0.0)),
        # No ratio of losses is known.
        ((0.0, -0.01, 0.0), 0.15, (None, 0.15, None)),
        ((None, None, None), 0.15, (None, 0.15, None)),
    ],
)
def test_bound_of_the_front_follows_the_verdict(old, high, new):
    points = with_bound(front(*old), Verdict(**PROVEN, lost_high=high)).points
    assert [point.lost for point in points] == [pytest.approx(each) for each in new]


def test_front_keeps_its_bound_where_only_text_was_judged():
    text = Verdict(proven=True, windows=4, perplexity=0.01, perplexity_high=0.02)
    assert with_bound(front(0.05, 0.01, 0.002), text) == front(0.05, 0.01, 0.002)


def test_gate_on_the_same_weights_updates_the_front_and_keeps_chosen_on(
    found, tiny_model, tmp_path
):
    artifact, arrays = artifacts.load_pair(found)
    points = tuple(
        point.model_copy(update={"lost": lost})
        for point, lost in zip(artifact.prefill.front.points, (0.02, 0.01, 0.005), strict=False)
    )
    changed = artifact.prefill.front.model_copy(update={"points": points})
    prefill = artifact.prefill.model_copy(update={"front": changed})
    evidence = artifact.evidence.model_copy(update={"chosen_on": OTHERS})
    source = tmp_path / "old.yaml"
    artifacts.save(
        artifact.model_copy(update={"prefill": prefill, "evidence": evidence}), source, arrays
    )
    artifact, arrays = artifacts.load_pair(source)
    out = tmp_path / "new.yaml"
    loaded = load_model(str(tiny_model), dtype="float32")
    assert write_for(loaded, source, out, artifact, arrays, Evidence(verdict=VERDICT)) == ()
    new = artifacts.load(out)
    assert new.evidence.chosen_on == OTHERS and new.evidence.verdict == VERDICT
    served = next(point for point in new.prefill.front.points if point.layers is None)
    assert served.lost == VERDICT.lost_high
    # No point promises what was just measured to be lost.
    with pytest.raises(HeadwiseError, match=r"no point of the front meets lost=0\.01"):
        load(out, point="lost=0.01")
    assert new.search == artifact.search


def test_gate_for_other_weights_leaves_out_what_was_measured_on_the_former(
    found, fine_tune, tmp_path, capsys
):
    out = tmp_path / "new.yaml"
    words = f"--dtype float32 --task prose --max-perplexity 9 --out {out}".split()
    assert main(["gate", str(found), "--model", str(fine_tune), *words]) == 0
    assert "measured on other weights: front, frontier, scores" in capsys.readouterr().out
    former = artifacts.load(found)
    new, arrays = artifacts.load_pair(out)
    assert former.search.frontier and not new.search.frontier and new.prefill.front is None
    summary = new.search.summary
    assert (summary.recall, summary.error) == (None, None)
    assert summary.winners == former.search.summary.winners
    assert not [name for name in arrays if name.startswith(("chosen.", "candidates."))]
    # What the search has seen is true of any weights.
    assert len(seen_windows(arrays)) == new.search.calibration.seen_windows > 0
    # The page and the pattern map do without the scores; there is no frontier to draw.
    assert main(["show", str(out)]) == 0 and main(["validate", str(out)]) == 0
    assert "recall" not in capsys.readouterr().out
    picture = Path(tmp_path / "picture")
    assert main(["plot", str(out), "--out", str(picture)]) == 0
    rows = picture.with_suffix(".csv").read_text().splitlines()
    assert rows[0].startswith("layer,head,pattern") and len(rows) == 19
    with pytest.raises(HeadwiseError, match="no frontier of budgets"):
        main(["plot", str(out), "--picture", "frontier", "--out", str(picture)])
