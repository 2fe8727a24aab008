"""python -m search.explain: what it says is true of the sidecar, and what it measures of the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from artifacts import HeadwiseError
from search.explain import Question, main, report, run

LENGTH = 1000


@pytest.fixture
def allocated(by_head: Path, tmp_path: Path) -> Path:
    """The same heads with one budget for the model: five candidates of known errors and seconds, and a price."""
    artifact, arrays = artifacts.load_pair(by_head)
    assert artifact.search is not None
    names = ["vs_64_64", "vs_128_128", "bs_4", "vs_256_256", "dense"]
    squared, milliseconds = [0.9, 0.4, 0.35, 0.1, 0.0], [1.0, 2.0, 4.0, 5.0, 20.0]
    shape = arrays["chosen.candidate"].shape
    kept = {name: array for name, array in arrays.items() if not name.startswith("candidates.")}
    for at, name in enumerate(names):
        values = {
            "error": squared[at] ** 0.5,
            "recall": 0.9,
            "density": 0.1 * (at + 1),
            "seconds": milliseconds[at] / 1e3,
        }
        for measure, value in values.items():
            kept[f"candidates.{at}.{name}.{measure}"] = np.full(shape, value, dtype=np.float32)
    # Nobody tried block-sparse for head 0.0.
    kept["candidates.2.bs_4.error"][0, 0] = np.nan
    kept["chosen.candidate"] = np.full(shape, 3, dtype=np.int32)
    # Between what the last step to vs_256_256 saves, 100 a second, and what dense would save: 6.7.
    kept["allocation.price"] = np.array([50.0])
    summary = artifact.search.summary.model_copy(update={"winners": {"vertical_slash": 18}})
    search = artifact.search.model_copy(update={"allocation": "model", "summary": summary})
    pattern = artifacts.VerticalSlash(kind="vertical_slash", vertical=256, slash=256)
    rows = tuple(("vs_256_256",) * shape[1] for _ in range(shape[0]))
    prefill = artifact.prefill.model_copy(update={"layers": rows})
    update = {"search": search, "patterns": {"vs_256_256": pattern}, "prefill": prefill}
    out = tmp_path / "model.yaml"
    artifacts.save(artifact.model_copy(update=update), out, kept)
    return out


def asked(file: Path, *head: int, **more: Any) -> dict[str, Any]:
    return run(Question(file=file, **dict(zip(("layer", "head"), head, strict=False)), **more))


def test_tells_what_was_tried_and_the_least_error_within_the_budget(by_head: Path) -> None:
    _, arrays = artifacts.load_pair(by_head)
    for layer in range(3):
        for head in range(6):
            answer = asked(by_head, layer, head)
            tried = answer["candidates"]
            assert len(tried) == 6
            errors = [row["error"] for row in tried]
            assert errors == sorted(errors)
            (winner,) = (row for row in tried if row["chosen"])
            assert winner["error"] == arrays["chosen.error"][layer, head]
            assert winner["pattern"] == answer["pattern"]
            assert winner["pattern"] in answer["why"][0]
            if errors[0] == winner["error"]:
                assert "the least error of the 6 candidates" in answer["why"][0]
            else:
                assert tried[0]["pattern"] in " ".join(answer["why"])


def test_at_a_price_the_neighbours_on_the_hull_say_why(allocated: Path) -> None:
    answer = asked(allocated, 1, 2)
    assert [row["seconds"] for row in answer["candidates"]] == sorted(row["seconds"] for row in answer["candidates"])
    on_hull = {row["pattern"] for row in answer["candidates"] if row["on_hull"]}
    assert on_hull == {"vs_64_64", "vs_128_128", "vs_256_256", "dense"}
    first, cheaper, dearer = answer["why"]
    assert "price of 0.05 squared error a ms" in first
    assert "vs_256_256" in first
    # (0.4 - 0.1) / 3 ms and 0.1 / 15 ms.
    assert "vs_128_128, would save 3 ms and add squared error at 0.1 a ms, more than the price" in cheaper
    assert "dense, would cost 15 ms more and take away squared error at 0.00667 a ms, less than the price" in dearer


@pytest.mark.parametrize(("measure", "said"), [("change", "change of the residual stream"), ("objective", "loss")])
def test_what_heads_lose_and_flops_are_weighed_where_they_are_known(allocated: Path, measure: str, said: str) -> None:
    artifact, arrays = artifacts.load_pair(allocated)
    for name in list(arrays):
        if name.endswith(".seconds"):
            arrays[name.replace("seconds", "flops")] = arrays.pop(name) * np.float32(1e12)
        if name.startswith("candidates.") and name.endswith(".error"):
            arrays[name.replace("error", "change")] = arrays[name] ** 2 * np.float32(7)
            arrays[name.replace("error", measure)] = arrays[name] ** 2 * np.float32(1e-3)
    arrays["allocation.price"] = np.array([50.0]) * 1e-3 / 1e12
    artifacts.save(artifact, allocated, arrays)
    answer = asked(allocated, 1, 2)
    assert answer["unit"] == "flops"
    first, cheaper, dearer = answer["why"]
    assert f"price of 5e-05 {said} a GFLOP" in first
    assert f"vs_128_128, would save 3 GFLOP and add {said} at 0.0001 a GFLOP, more" in cheaper
    assert "dense, would cost 15 GFLOP more" in dearer
    assert "4.00e-04" in report(answer) and said.split()[0] in report(answer).splitlines()[3]


def test_a_candidate_that_was_not_tried_for_a_head_is_not_told(allocated: Path) -> None:
    assert len(asked(allocated, 0, 0)["candidates"]) == 4
    assert len(asked(allocated, 0, 1)["candidates"]) == 5


def test_a_layers_weight_counts(allocated: Path) -> None:
    artifact, arrays = artifacts.load_pair(allocated)
    arrays["allocation.weight"] = np.array([1.0, 1.0, 0.1])
    artifacts.save(artifact, allocated, arrays)
    assert "least sum" in asked(allocated, 1, 0)["why"][0]
    # At a tenth of the weight the step to 5 ms saves 10 a second: not worth 50.
    (why,) = asked(allocated, 2, 0)["why"]
    assert "would have vs_64_64" in why or "would have vs_128_128" in why
    assert "later step" in why


def test_says_when_a_row_was_changed_after_the_search(by_head: Path, tmp_path: Path) -> None:
    artifact, arrays = artifacts.load_pair(by_head)
    rows = [list(row or ()) for row in artifact.prefill.layers]
    rows[2][3] = "a_64_64"
    used = {name: artifact.patterns[name] for row in rows for name in row if name in artifact.patterns}
    patterns = {**used, "a_64_64": artifacts.AShape(kind="a_shape", sink=64, window=64)}
    prefill = artifact.prefill.model_copy(update={"layers": tuple(map(tuple, rows))})
    out = tmp_path / "edited.yaml"
    artifacts.save(artifact.model_copy(update={"patterns": patterns, "prefill": prefill}), out, arrays)
    assert "serves a_64_64 all the same" in asked(out, 2, 3)["why"][-1]
    assert "all the same" not in asked(out, 2, 2)["why"][-1]


def test_overviews_agree_with_the_arrays(by_head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, arrays = artifacts.load_pair(by_head)
    layers = asked(by_head)["layers"]
    np.testing.assert_allclose([layer["error"] for layer in layers], arrays["chosen.error"].mean(1), rtol=1e-5)
    assert layers[1]["worst"] == f"1.{int(arrays['chosen.error'][1].argmax())}"
    assert main([str(by_head), "--layer", "1", "--json"]) == 0
    heads = json.loads(capsys.readouterr().out)["heads"]
    assert [head["pattern"] for head in heads] == list(artifact.prefill.layers[1] or ())
    assert main([str(by_head), "--head", "all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--head", "3.0"], "no head 3.0: tiny has layers 0 to 2, each with heads 0 to 5"),
        (["--head", "0.6"], "no head 0.6"),
        (["--layer", "7"], "no layer 7"),
        (["--layer", "-1"], "no layer -1"),
        (["--head", "3"], "must be LAYER.HEAD such as 3.5, or all"),
        (["--head", "a.b"], "must be LAYER.HEAD"),
        (["--layer", "0", "--model", "smollm2"], "give --head LAYER.HEAD"),
    ],
)
def test_a_wrong_question_ends_in_one_line(by_head: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(HeadwiseError, match=re.escape(said)) as caught:
        main([str(by_head), *arguments])
    assert "\n" not in str(caught.value)


def test_an_artifact_without_scores_is_refused(by_head: Path, tmp_path: Path) -> None:
    artifact, arrays = artifacts.load_pair(by_head)
    bare = tmp_path / "bare.yaml"
    artifacts.save(artifact, bare, {"calibration.seen_windows": arrays["calibration.seen_windows"]})
    with pytest.raises(HeadwiseError, match=r"bare\.yaml: this artifact has no scores of candidates"):
        asked(bare, 0, 0)
    del arrays[next(name for name in arrays if name.startswith("candidates.0.") and name.endswith(".error"))]
    artifacts.save(artifact, bare, arrays)
    with pytest.raises(HeadwiseError, match="has no error of the candidate a_shape"):
        asked(bare, 0, 0)


def test_an_import_and_a_layer_left_alone_are_refused(by_head: Path, tmp_path: Path) -> None:
    artifact, arrays = artifacts.load_pair(by_head)
    source = artifacts.Imported(format="minference", file="best.json", sha256="0" * 64, scores="recall")
    prefill = artifact.prefill.model_copy(update={"imported": source})
    out = tmp_path / "imported.yaml"
    windows = arrays.pop("calibration.seen_windows")
    artifacts.save(artifact.model_copy(update={"search": None, "prefill": prefill}), out, arrays)
    arrays["calibration.seen_windows"] = windows
    with pytest.raises(HeadwiseError, match=r"was imported from best\.json \(minference\)"):
        asked(out, 0, 0)
    rows = (artifact.prefill.layers[0], None, artifact.prefill.layers[2])
    used = {name: artifact.patterns[name] for row in rows for name in row or ()}
    prefill = artifact.prefill.model_copy(update={"layers": rows})
    artifacts.save(artifact.model_copy(update={"patterns": used, "prefill": prefill}), out, arrays)
    with pytest.raises(HeadwiseError, match="layer 1 is left as it is"):
        asked(out, 1, 0)
    assert [layer["layer"] for layer in asked(out)["layers"]] == [0, 2]


def test_arrays_of_another_shape_are_refused(by_head: Path, tmp_path: Path) -> None:
    artifact, arrays = artifacts.load_pair(by_head)
    arrays["chosen.candidate"] = arrays["chosen.candidate"][:, :5]
    out = tmp_path / "short.yaml"
    artifacts.save(artifact, out, arrays)
    with pytest.raises(HeadwiseError, match=r"chosen\.candidate has the shape \(3, 5\)"):
        asked(out, 0, 0)


def test_the_picture_comes_with_its_numbers(by_head: Path, tiny_model: Path, tmp_path: Path) -> None:
    answer = asked(by_head, 2, 1, model=str(tiny_model), length=500, out=tmp_path / "why", command="test")
    names = {"head_2_1.png", "head_2_1.svg", "head_2_1.csv", "head_2_1_queries.csv"}
    assert {path.name for path in (tmp_path / "why").iterdir()} == names
    assert {Path(file).name for file in answer["files"]} == names
    assert len((tmp_path / "why" / "head_2_1_queries.csv").read_text().splitlines()) == 1 + 500
    assert answer["missed"]["sentence"] in report(answer)


def test_another_model_and_a_length_beyond_it_are_refused(by_head: Path, tiny_model: Path, tmp_path: Path) -> None:
    from tests.search.conftest import save_tiny

    other = save_tiny(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(HeadwiseError, match="num_layers is 3 in the artifact"):
        asked(by_head, 0, 0, model=str(other), out=tmp_path)
    with pytest.raises(HeadwiseError, match="--length 2000 is more than the 1024 positions"):
        asked(by_head, 0, 0, model=str(tiny_model), length=2000, out=tmp_path)


def test_searched_on_a_file_asks_for_it(by_head: Path, tiny_model: Path, tmp_path: Path) -> None:
    artifact, arrays = artifacts.load_pair(by_head)
    assert artifact.search is not None
    calibration = artifact.search.calibration.model_copy(update={"tasks": ("text:novel.txt",)})
    out = tmp_path / "text.yaml"
    search = artifact.search.model_copy(update={"calibration": calibration})
    artifacts.save(artifact.model_copy(update={"search": search}), out, arrays)
    with pytest.raises(HeadwiseError, match=r"looked at text:novel\.txt, whose file is not in the artifact"):
        asked(out, 0, 0, model=str(tiny_model), out=tmp_path)


def test_findings_need_no_model_and_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, search.explain; assert 'torch' not in sys.modules and 'optuna' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
