"""python -m profiling.fidelity: what an artifact keeps, what a conversion costs, and what it writes back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import artifacts
import runtime
from artifacts import HeadwiseError
from artifacts.commands.convert import Config as Convert
from artifacts.commands.convert import run as convert
from profiling.fidelity import Measured, main, report, run
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from search.published.config import HeadSearch
from search.published.head_budget import run as search
from tests.search.conftest import save_tiny

LENGTH = 700


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("fidelity") / "tiny")


@pytest.fixture
def imported(tiny: Path, tmp_path: Path) -> Path:
    """An artifact of MInference's kind for the tiny model: every head of layer 0 dense in effect, others narrow."""
    entries = [{str(h): ["stream_llm", 64, 4096 if layer == 0 else 64, 0.5] for h in range(6)} for layer in range(3)]
    (tmp_path / "heads.json").write_text(json.dumps(entries))
    out = tmp_path / "cfg.yaml"
    convert(Convert(file=tmp_path / "heads.json", config=tiny, out=out))
    return out


def measured(file: Path, model: Path, **options: object) -> Measured:
    return Measured(file=file, model=str(model), dtype="float32", length=LENGTH, **options)  # type: ignore[arg-type]


def test_what_is_known_of_the_patterns(imported: Path, tiny: Path) -> None:
    result, found = run(measured(imported, tiny, samples=2))
    assert found.recall.shape == (3, 6)
    np.testing.assert_allclose(found.recall[0], 1.0, atol=1e-5)
    np.testing.assert_allclose(found.density[0], 1.0)
    assert (found.recall[1:] < 0.99).all() and (found.density[1:] < 0.6).all()
    assert result.mean["recall"] == pytest.approx(found.recall.mean()) and result.against is None
    assert result.layers[0] == pytest.approx(1.0, abs=1e-5)


def test_samples_are_averaged(imported: Path, tiny: Path) -> None:
    one, two = (run(measured(imported, tiny, samples=n))[1].recall for n in (1, 2))
    assert not np.allclose(one, two)


def test_what_a_conversion_costs(imported: Path, tiny: Path, tmp_path: Path) -> None:
    """A tri-shape loses its last queries on the way to MInference, and only those."""
    artifact, arrays = artifacts.load_pair(imported)
    tri = artifacts.TriShape(sink=64, window=64, last=LENGTH)
    rows = (artifact.prefill.layers[0], ("tri",) * 6, artifact.prefill.layers[2])
    changes = {
        "patterns": artifact.patterns | {"tri": tri},
        "prefill": artifact.prefill.model_copy(update={"layers": rows}),
    }
    artifacts.save(artifact.model_copy(update=changes), imported, arrays)
    convert(Convert(file=imported, target="minference", out=tmp_path / "out.json"))
    convert(Convert(file=tmp_path / "out.json", config=tiny, out=tmp_path / "back.yaml"))
    result, _ = run(measured(imported, tiny, against=tmp_path / "back.yaml"))
    assert result.changed is not None and result.against is not None
    heads, before, after = result.changed
    assert heads == 6 and before == pytest.approx(1.0, abs=1e-5) and after < 0.99
    lost = result.mean["recall"] - result.against["recall"]
    assert lost == pytest.approx((before - after) * 6 / 18, abs=1e-5)
    assert f"loses {lost:.4f} of recall" in report(result) and "6 heads have another pattern" in report(result)


def test_update_fills_in_what_an_import_left_open(
    imported: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(imported), "--model", str(tiny), "--dtype", "float32", "--length", str(LENGTH), "--update"]
    for _ in range(2):
        assert main([*line, "--json", str(imported.with_name("f.json"))]) == 0
    artifact, arrays = artifacts.load_pair(imported)
    expected = fingerprint(load_model(str(tiny), dtype="float32").model, name=str(tiny))
    assert artifact.model.weights_sha256 == expected.weights_sha256 and artifact.model.rope == expected.rope
    assert [entry.name for entry in artifact.evidence.measurements] == [
        "recall on passkey",
        "error on passkey",
        "density on passkey",
    ]
    assert (
        artifact.evidence.measurements[0].command.startswith("python -m profiling.fidelity ")
        and artifact.prefill.imported
    )
    assert {"imported.score", "chosen.recall"} <= arrays.keys()
    record = json.loads(imported.with_name("f.json").read_text())
    np.testing.assert_allclose(record["heads"]["recall"], arrays["chosen.recall"], rtol=1e-6)
    assert f"at {LENGTH} tokens" in capsys.readouterr().out


def test_earlier_heads_choices_stand_below(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{str(h): ["vertical_and_slash", 128, 64, 0.5] for h in range(6)} for _ in range(3)]
    (tmp_path / "heads.json").write_text(json.dumps(rows))
    convert(Convert(file=tmp_path / "heads.json", config=tiny, out=tmp_path / "cfg.yaml"))
    line = [str(tmp_path / "cfg.yaml"), "--model", str(tiny), "--dtype", "float32", "--length", str(LENGTH)]
    line += ["--earlier", "--samples"]
    assert main([*line, "3", "--json", str(tmp_path / "f.json")]) == 0
    estimate, scores = json.loads((tmp_path / "f.json").read_text())["earlier"]
    assert (estimate["way"], scores["way"]) == ("estimate", "scores") and estimate["heads"] == scores["heads"] == 12
    assert "chosen by best earlier head, scores" in capsys.readouterr().out
    with pytest.raises(HeadwiseError, match="--earlier fits on one prompt and needs two to measure on: --samples is 2"):
        main([*line, "2"])


def test_what_is_refused(imported: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="--samples must be at least 1, got 0"):
        run(measured(imported, tiny, samples=0))
    other = save_tiny(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(HeadwiseError, match="this artifact is for another model: num_layers is 3"):
        run(measured(imported, other))
    (tmp_path / "duo.tsv").write_text("0.9\t0.1\n" * 3)
    convert(Convert(file=tmp_path / "duo.tsv", config=tiny, out=tmp_path / "kv.yaml"))
    with pytest.raises(HeadwiseError, match="has no patterns"):
        run(measured(tmp_path / "kv.yaml", tiny))


def test_imports_are_served(imported: Path, tiny: Path, tmp_path: Path) -> None:
    """What an import leaves open of the model is not compared; layers without patterns stay as they are."""
    model = load_model(str(tiny), dtype="float32").model
    ids = torch.randint(0, 256, (1, 1024))
    (tmp_path / "duo.tsv").write_text("0.9\t0.1\n" * 3)
    convert(Convert(file=tmp_path / "duo.tsv", config=tiny, out=tmp_path / "kv.yaml"))
    with torch.no_grad():
        dense = model(ids).logits
        # On fewer keys than the kernel serves densely: the very same function runs.
        short = ids[:, :1000]
        alone = model(short).logits
        with runtime.load(tmp_path / "kv.yaml").apply(model):
            assert torch.equal(model(short).logits, alone)
        with runtime.load(imported).apply(model, strict=True, backend="reference") as handle:
            sparse = model(ids).logits
            assert handle.stats()["sparse"] == 3
    assert not torch.allclose(sparse, dense, atol=1e-3)


def test_on_the_calibration_prompt_it_is_what_the_search_wrote(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "searched.yaml"
    search(HeadSearch(model=str(tiny), out=out, length=LENGTH, budget="0.8", dtype="float32", command="x"))
    _, found = run(measured(out, tiny, seed=0))
    arrays = artifacts.load_arrays(out)
    for name in ("error", "recall", "density"):
        np.testing.assert_allclose(getattr(found, name), arrays[f"chosen.{name}"], rtol=1e-5, atol=1e-6)
