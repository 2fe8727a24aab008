"""headwise search with one budget for the model, as its users run it, on a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import artifacts
from artifacts import HeadwiseError
from profiling.inside.head_fidelity import fidelity
from profiling.ledger import Ledger
from profiling.models.loading import load_model
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import digest, make_prompts
from profiling.quality.sequences import Reference, sequences
from profiling.speed.baselines import HEADWISE, KERNEL
from profiling.speed.layer_times import ANCHOR, SDPA
from runtime import load
from search.gate import plans_of
from search.heads import main
from search.model import search, timed_costs
from search.model.allocation import spendable
from search.model.limits import Limits
from search.model.prompts import held_out_prompts, held_out_sets
from search.model.task_losses import by_task
from tests.processes import run
from tests.sampling import sampled
from tests.search.conftest import save_tiny
from tests.search.model.made import heads_of

LENGTH = 512
TASKS = ("passkey", "prose")
LIMITS = ("max_kl", "max_perplexity", "max_nll")


def options(model: Path, at: Path, *more: str, **changes: str | None) -> list[str]:
    told = {
        "model": str(model),
        "out": str(at),
        "length": str(LENGTH),
        "calibration": " ".join(TASKS),
        "budget": "0.65",
        "cost": "flops",
        "n_trials": "3",
        "dtype": "float32",
        # A random model has no head that can do without much.
        **dict.fromkeys(LIMITS, "9"),
        "max_lost": "1",
        **changes,
    }
    tasks = (told.pop("calibration") or "").split()
    named = [
        (f"--{name.replace('_', '-')}", value.split())
        for name, value in told.items()
        if value is not None
    ]
    named += [("--task", [task]) for task in tasks]
    return [*(word for name, values in named for word in (name, *values)), "--no-picture", *more]


def content(path: Path) -> str | None:
    return artifacts.load(path).content_sha256


def ledger_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.heads.ledger")


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("found") / "cfg.yaml"
    assert main(options(tiny_model, out)) == 0
    return out


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are scored, as they are."""
    from search.model import scored_prompts

    layers: list[int] = []
    real = scored_prompts.score_layer

    def score_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
        layers.append(layer.inputs.layer)
        return real(layer, *args, **kwargs)

    monkeypatch.setattr(scored_prompts, "score_layer", score_layer)
    return layers


def test_it_writes_a_valid_pair_and_nothing_else(found: Path) -> None:
    artifact = artifacts.load(found)
    assert artifact.sidecar is not None and artifact.search is not None
    assert {path.name for path in found.parent.iterdir()} == {"cfg.yaml", artifact.sidecar.file}
    search = artifact.search
    assert (search.allocation, search.n_trials, search.cost.unit) == ("model", 3, "flops")
    assert search.calibration.tasks == TASKS and search.calibration.lengths == (LENGTH,)
    assert sum(search.summary.winners.values()) == 18
    assert artifact.prefill.dense_below == LENGTH // 2 and artifact.costs == ()


def test_the_front_ascends_and_what_is_served_keeps_to_the_budget(found: Path) -> None:
    artifact, arrays = artifacts.load_pair(found)
    front = artifact.prefill.front
    assert front is not None and len(front.points) > 1 and front.measured_on == "held_out"
    for cheap, dear in pairwise(front.points):
        assert cheap.cost < dear.cost and cheap.kl > dear.kl and cheap.speedup > dear.speedup
    spent = float(arrays["chosen.flops"].sum())
    assert 0.55 * front.dense_cost < spent <= 0.65 * front.dense_cost * (1 + 1e-6)
    assert artifact.prefill.dense_tail in (64, 256)
    assert any(point.cost == pytest.approx(spent, rel=1e-5) for point in front.points)
    np.testing.assert_allclose(
        artifact.search.summary.density, np.nanmean(arrays["chosen.density"]), rtol=1e-5
    )


def test_evidence_is_what_held_out_prompts_say(found: Path, tiny_model: Path) -> None:
    artifact, arrays = artifacts.load_pair(found)
    loaded = load_model(str(tiny_model), dtype="float32")
    calibration = [
        p
        for t in TASKS
        for p in make_prompts(t, loaded.tokenizer, length=LENGTH, samples=1, seed=0)
    ]
    prompts = held_out_prompts(
        TASKS, loaded, length=LENGTH, samples=1, seed=0, seen=Seen(calibration), number=0
    )
    reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
    plans = plans_of(artifact, arrays, LENGTH)
    losses = [reference.losses(number, plans) for number in range(len(reference.sequences))]
    assert artifact.search is not None and artifact.evidence is not None
    assert artifact.search.calibration.sha256 == digest(calibration)
    assert artifact.evidence.chosen_on is None
    for figures, task in zip(
        artifact.evidence.tasks, by_task(reference.sequences, losses), strict=True
    ):
        assert figures.task == task.task and figures.kl == pytest.approx(task.kl, rel=1e-4)
        if task.nll_rise is None:
            assert figures.perplexity_ratio == pytest.approx(task.perplexity_ratio, rel=1e-4)
            assert (figures.nll_rise, figures.dense_right, figures.lost) == (None, None, None)
        else:
            assert (
                figures.nll_rise == pytest.approx(task.nll_rise, rel=1e-4)
                and figures.perplexity_ratio is None
            )
            assert (figures.prompts, figures.answers) == (task.prompts, task.answers)
            assert (figures.dense_right, figures.lost) == (task.dense_right, task.lost)
    # What was seen is known by its tokens: calibration and what the gate looked at.
    seen = Seen.by([arrays])
    assert all(map(seen.overlaps, [*calibration, *prompts]))
    # Scores are estimates from some tiles; at this length all are taken.
    errors = np.mean(
        [fidelity(loaded.model, artifact, prompt).error for prompt in calibration], axis=0
    )
    np.testing.assert_allclose(arrays["chosen.error"], errors, rtol=2e-3, atol=1e-5)


def test_points_of_the_front_are_served(found: Path, tiny_model: Path) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    front = artifacts.load(found).prefill.front
    assert front is not None
    ids = torch.randint(0, 250, (1, LENGTH))
    far = []
    with torch.no_grad():
        dense = loaded.model(ids).logits
        for point in (front.points[0], front.points[-1]):
            with load(found, target_kl=point.kl).apply(loaded.model, strict=True):
                far.append(float((loaded.model(ids).logits - dense).norm()))
    assert far[0] > far[1]


def test_held_out_prompts_that_raise_the_budget_do_not_report(
    found: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = artifacts.load(found).evidence
    assert evidence is not None
    # The calibration prompts pass, the first held-out ones fail, and from there on all pass.
    verdicts = iter([None, "prose: too much is lost"])
    monkeypatch.setattr(Limits, "fault", lambda self, tasks: next(verdicts, None))
    out = tmp_path / "cfg.yaml"
    assert main(options(tiny_model, out)) == 0
    artifact, arrays = artifacts.load_pair(out)
    raised = artifact.evidence
    assert raised is not None and raised.chosen_on is not None
    # Where a task failed the others did not choose.
    assert 0 < raised.chosen_on.prompts < evidence.reported_on.prompts == raised.reported_on.prompts
    assert evidence.reported_on.sha256 != raised.reported_on.sha256
    assert artifact.prefill.front is not None
    assert arrays["chosen.flops"].sum() > 0.5 * artifact.prefill.front.dense_cost


@dataclass
class Clock:
    """A made-up clock: every run is real, and takes as long as this says.

    dense: attention of a layer over every key; sparse: by the patterns that were accepted;
    candidates take 0.1 ms.

    first_token: times as fast as dense attention to the first token. attention: what was timed of
    it, as (tokens, names, whether one turn is not counted). prefills: the ways of each round."""

    dense: float = 1e-3
    sparse: float = 1e-4
    first_token: float = 2.0
    attention: list[tuple[int, list[str], bool]] = field(default_factory=list)
    prefills: list[list[str]] = field(default_factory=list)

    def in_turn(
        self, runs: Mapping[str, Callable[[], Any]], *, warm_up: bool, **_: Any
    ) -> dict[str, list[float]]:
        (tokens,) = {run().shape[2] for run in runs.values()}
        self.attention.append((tokens, list(runs), warm_up))
        is_dense = {name: name in (ANCHOR, SDPA) or name.startswith("Dense") for name in runs}
        candidates = {name: [self.dense if is_dense[name] else 1e-4] for name in runs}
        return candidates | ({"chosen": [self.sparse]} if "chosen" in runs else {})

    def interleaved(
        self, ways: Any, run: Any, *, repeats: int, device: str
    ) -> dict[str, list[float]]:
        for enter in ways.values():
            with enter():
                run()
        self.prefills.append(list(ways))
        return {name: [1.0 if name == HEADWISE else self.first_token] for name in ways}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("profiling.speed.layer_times.in_turn", clock.in_turn)
    monkeypatch.setattr("search.model.speed.interleaved", clock.interleaved)
    return clock


# By such a clock an allocation takes as long whatever it computes, so that cheap ones look dear.
TIMED: dict[str, str | None] = {"cost": "seconds", "n_trials": "1", "budget": "0.7"}


def test_in_seconds_candidates_are_timed_and_what_is_found_is_timed_again(
    tiny_model: Path, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense attention takes ten times as long as patterns, and a whole prefill twice as long."""
    out = tmp_path / "cfg.yaml"
    assert main(options(tiny_model, out, **TIMED)) == 0
    artifact = artifacts.load(out)
    assert (
        artifact.search is not None
        and artifact.search.cost.unit == "seconds"
        and len(artifact.costs) == 1
    )
    assert artifact.prefill.dense_below == LENGTH // 2
    whole, *attention = artifact.evidence.measurements
    assert (whole.name, whole.value, whole.baseline, whole.samples) == (
        "seconds to the first token",
        1.0,
        2.0,
        6,
    )
    assert whole.baseline_name == "dense attention by Headwise's kernel"
    assert [one.value for one in attention] == pytest.approx([3e-4] * 3)
    assert {one.baseline_name: one for one in attention}[
        "dense attention by sdpa"
    ].baseline == pytest.approx(3e-3)
    # Three budgets, and of all kinds some, on each layer; then what was found, and that on half the
    # prompt.
    costs = clock.attention[:3]
    chosen = clock.attention[3:]
    kinds = {name.partition("(")[0] for name in costs[0][1]}
    assert kinds == {
        "0",
        "1",
        "2",
        "AShape",
        "VerticalSlash",
        "BlockSparse",
        "SkipSoftmax",
        "Dense",
        ANCHOR,
    }
    assert [names for _, names, _ in chosen[:2]] == [["chosen", ANCHOR, SDPA]] * 2
    assert [tokens for tokens, _, _ in chosen] == [LENGTH, LENGTH // 2] * 3
    # One turn is not counted where each length is timed first.
    assert [first for _, _, first in clock.attention] == [
        True,
        False,
        False,
        True,
        True,
        *[False] * 4,
    ]
    # Against the fastest dense baseline alone, in turn.
    assert clock.prefills == [[KERNEL, HEADWISE]] * 6
    said = capsys.readouterr().out
    block = said.split("\n\n")[-1].splitlines()
    assert block[0].startswith(
        "2.0 -> 1.0 s to the first token at 512 tokens (2.00x the fastest dense attention's); "
        "attention alone 10.00x; not proven: 0 right answers of 4 contexts; "
    )
    assert block[1].startswith("budget   asked 0.7, spent 0.")
    assert block[2].startswith(f"wrote {out}, ") and "headwise gate " in block[3]
    assert artifact.evidence.verdict == artifacts.Verdict(
        proven=False, why="0 right answers of 4 contexts"
    )


def test_what_is_not_worth_serving_is_written_only_where_that_is_asked_for(
    tiny_model: Path, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too little is gained in attention, or the whole prefill is slower for all of it."""
    out = tmp_path / "cfg.yaml"
    clock.sparse = clock.dense / 1.04
    assert main(options(tiny_model, out, **TIMED)) == 3
    block = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert block[0].startswith("not worth serving at 512 tokens: 1.04x; ")
    assert "--keep" in block[-1] and clock.prefills and not list(tmp_path.iterdir())
    clock.sparse = clock.dense / 10
    clock.first_token = 0.98
    assert main(options(tiny_model, out, "--keep", **TIMED)) == 0
    block = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    says = "not worth serving at 512 tokens: 0.98x to the first token, attention alone 10.00x; "
    assert block[0].startswith(says)
    assert block[2].startswith(f"wrote {out}, ") and artifacts.load(out).search is not None


def test_without_a_gain_a_longer_prompt_is_advised_and_a_file_from_before_stays(
    found: Path,
    tiny_model: Path,
    tmp_path: Path,
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "cfg.yaml"
    artifact, arrays = artifacts.load_pair(found)
    artifacts.save(artifact, out, arrays)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    clock.sparse = clock.dense
    assert main(options(tiny_model, out, **TIMED | {"budget": None})) == 3
    block = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    # The model has 1,024 positions.
    assert block[0] == "not worth serving at 512 tokens: 1.00x; try --length 1024"
    assert block[1].startswith("budget   asked 0.25, spent ")
    # A prefill of which nothing would be sparse is not timed.
    assert not clock.prefills
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_by_flops_it_is_the_count_that_decides(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cfg.yaml"
    assert main(options(tiny_model, out, n_trials="1", budget="0.99")) == 3
    block = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert re.fullmatch(
        r"not worth serving at 512 tokens: 1\.0\dx fewer FLOPs of attention, counted and not "
        r"timed; "
        r"try a smaller --budget",
        block[0],
    )
    assert not list(tmp_path.iterdir())


def test_what_was_timed_is_not_timed_again_by_the_search_that_goes_on(
    tiny_model: Path, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    out = tmp_path / "cfg.yaml"
    with monkeypatch.context() as patch:
        patch.setattr("search.model.speed.interleaved", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(options(tiny_model, out, **TIMED))
    assert not out.exists() and len(clock.attention) == 9
    with monkeypatch.context() as patch:
        patch.setattr("search.model.record.save_searched", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(options(tiny_model, out, **TIMED))
    assert not out.exists() and len(clock.prefills) == 6
    assert main(options(tiny_model, out, **TIMED)) == 0
    assert (len(clock.attention), len(clock.prefills)) == (9, 6) and not ledger_of(out).exists()


@pytest.mark.parametrize("after", sampled([5, 8, 11], 8))
def test_interrupted_anywhere_it_loses_nothing_and_finds_the_same(
    found: Path, tiny_model: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cfg.yaml"
    real = Ledger.put
    kept = [0]

    def put(self: Ledger, unit: Any, value: Any) -> Any:
        if kept[0] == after:
            raise KeyboardInterrupt
        kept[0] += 1
        return real(self, unit, value)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "put", put)
        with pytest.raises(KeyboardInterrupt):
            main(options(tiny_model, out))
    before = set(ledger_of(out).glob("*.unit"))
    assert len(before) == after and not out.exists()
    again: list[Path] = []

    def counted(self: Ledger, unit: Any, value: Any) -> Any:
        again.append(self.folder / f"{unit.key}.unit")
        return real(self, unit, value)

    monkeypatch.setattr(Ledger, "put", counted)
    assert main(options(tiny_model, out)) == 0
    assert (
        not before & set(again) and content(out) == content(found) and not ledger_of(out).exists()
    )


@pytest.mark.slow
def test_any_number_of_ranks_finds_the_same(found: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "cfg.yaml"
    code, _, said = run("search.heads", *options(tiny_model, out), ranks=3)
    assert code == 0, said
    assert content(out) == content(found) and not ledger_of(out).exists()
    assert out.with_name(artifacts.load(out).sidecar.file).read_bytes() == (
        found.with_name(artifacts.load(found).sidecar.file).read_bytes()
    )


def test_prompts_that_raise_the_budget_and_report_are_not_called_held_out(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is one set, as of a text that is too short for another."""
    verdicts = iter([None, "prose: too much is lost"])
    monkeypatch.setattr(Limits, "fault", lambda self, tasks: next(verdicts, None))
    monkeypatch.setattr(search, "held_out_sets", lambda *args: islice(held_out_sets(*args), 1))
    out = tmp_path / "cfg.yaml"
    assert main(options(tiny_model, out, n_trials="1")) == 0
    artifact = artifacts.load(out)
    assert artifact.evidence.chosen_on is not None and artifact.evidence.reported_on is not None
    assert (
        artifact.evidence.chosen_on.name
        == artifact.evidence.reported_on.name
        == "by which the budget was raised"
    )
    assert (
        artifact.prefill.front is not None and artifact.prefill.front.measured_on == "calibration"
    )
    said = capsys.readouterr().out
    assert "held-out prompts" not in said and "prompts by which the budget was raised" in said


def test_times_are_those_of_this_machine_and_this_budget(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of another budget, or of other threads, are not used by the search that goes on."""
    taken: list[int] = []
    real = timed_costs._time
    monkeypatch.setattr(timed_costs, "_time", lambda *args: taken.append(1) or real(*args))
    monkeypatch.setattr(
        "profiling.speed.layer_times.in_turn", lambda runs, **_: {name: [1e-3] for name in runs}
    )
    out = tmp_path / "cfg.yaml"
    asked = {"cost": "seconds", "n_trials": "1", "budget": "0.7", "max_kl": "0.0000001"}
    more: dict[str, str]
    for count, more in ((1, {}), (1, {}), (2, {"budget": "0.6"})):
        with pytest.raises(HeadwiseError):
            main(options(tiny_model, out, **asked | more))
        assert len(taken) == count
    monkeypatch.setattr(
        timed_costs, "environment", lambda device: {"device": device, "threads": "64"}
    )
    with pytest.raises(HeadwiseError):
        main(options(tiny_model, out, **asked))
    assert len(taken) == 3


def test_another_budget_goes_on_from_the_curves_of_one_that_failed_the_gate(
    tiny_model: Path, tmp_path: Path, scored: list[int]
) -> None:
    out = tmp_path / "cfg.yaml"
    with pytest.raises(HeadwiseError, match=r"the gate: .*KL to dense attention is") as error:
        main(options(tiny_model, out, max_kl="0.0000001", n_trials="1"))
    assert "\n" not in str(error.value) and len(scored) == 6
    assert [path.name for path in tmp_path.iterdir()] == [ledger_of(out).name]
    with pytest.raises(
        HeadwiseError, match=r"its tasks is .* not .*passkey.*; repeat that command"
    ) as error:
        main(options(tiny_model, out, calibration="passkey"))
    assert "\n" not in str(error.value) and "--fresh" in str(error.value)
    with pytest.raises(HeadwiseError, match="its dtype is 'float32', not 'bfloat16'"):
        main(options(tiny_model, out, dtype="bfloat16"))
    assert main(options(tiny_model, out, budget="0.7", n_trials="2")) == 0 and len(scored) == 6


def test_layers_that_come_in_one_at_a_time_give_the_same(
    found: Path, tiny_model: Path, tmp_path: Path
) -> None:
    model = load_model(str(tiny_model), dtype="float32").model
    kept = model.get_input_embeddings().weight.nbytes
    if not model.config.tie_word_embeddings:
        kept += model.get_output_embeddings().weight.nbytes
    some = (
        kept
        + max(sum(weight.nbytes for weight in layer.parameters()) for layer in model.model.layers)
        * 3
        // 2
    )
    assert (
        load_model(str(tiny_model), dtype="float32", max_memory=some).model.hf_device_map[
            "model.layers.2"
        ]
        == "disk"
    )
    out = tmp_path / "cfg.yaml"
    assert main(options(tiny_model, out, "--max-memory", str(some))) == 0
    assert content(out) == content(found)
    with pytest.raises(HeadwiseError, match="its embeddings take"):
        load_model(str(tiny_model), dtype="float32", max_memory=1000)


def test_fresh_discards_what_is_there(
    tiny_model: Path,
    tmp_path: Path,
    scored: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "cfg.yaml"
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "remove", lambda self: None)
        assert main(options(tiny_model, out, n_trials="1")) == 0
    assert len(scored) == 6
    before = content(out)
    fresh = options(tiny_model, out, "--fresh", calibration="passkey", n_trials="1")
    assert main(fresh) == 0
    assert len(scored) == 9 and content(out) != before


def test_lengths_in_any_order_are_one_search_and_sizes_grow(
    tiny_model: Path, tmp_path: Path
) -> None:
    hashes = set()
    for name, lengths, tasks in (
        ("a", "256 512", "passkey prose"),
        ("b", "512 256 512", "passkey prose passkey"),
    ):
        out = tmp_path / f"{name}.yaml"
        assert (
            main(
                options(
                    tiny_model, out, length=lengths, calibration=tasks, n_trials="1", budget="0.7"
                )
            )
            == 0
        )
        artifact = artifacts.load(out)
        assert artifact.search is not None and artifact.search.calibration.lengths == (256, 512)
        assert artifact.prefill.growth is None or artifact.prefill.growth.length == 512
        hashes.add(artifact.content_sha256)
    assert len(hashes) == 1


def test_without_gradients_it_goes_by_the_change_and_says_so(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("profiling.inside.gradients._head_of", lambda model, ids: None)
    out = tmp_path / "cfg.yaml"
    assert main(options(tiny_model, out, n_trials="1")) == 0
    assert "no gradients (" in capsys.readouterr().err
    artifact, arrays = artifacts.load_pair(out)
    assert artifact.search is not None and "makes its logits in a way of its own" in (
        artifact.search.gradient_fault or ""
    )
    np.testing.assert_allclose(arrays["chosen.objective"], arrays["chosen.change"], rtol=1e-5)


def test_a_budget_that_is_too_small_leaves_the_curves_for_a_larger_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cfg.yaml"
    says = r"--budget 0\.05 is impossible at 512 tokens: the cheapest candidates cost 0\."
    with pytest.raises(HeadwiseError, match=says):
        main(options(tiny_model, out, budget="0.05"))
    assert list(tmp_path.iterdir()) == [ledger_of(out)]


def test_a_model_that_only_slides_has_nothing_to_search(tmp_path: Path) -> None:
    sizes = {"head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3}
    model = save_tiny(tmp_path / "m", family="Gemma3", config="Gemma3Text", **sizes)
    with pytest.raises(
        HeadwiseError, match=r"every layer of .* slides over a window already: nothing to search"
    ):
        main(options(model, tmp_path / "cfg.yaml"))
    assert not list(tmp_path.glob("cfg*"))


def test_without_a_budget_there_is_always_one() -> None:
    heads = heads_of(0, heads=4, candidates=8)
    costs = {tail: 0.5 + 0.5 * costs / np.nanmax(costs) for tail, costs in heads.costs.items()}
    heads = replace(heads, costs=costs, all_keys=1.0)
    least = min(map(heads.least, heads.curves))
    total, why = spendable(heads, None, length=128)
    assert least < total < heads.total(1.0) and total == pytest.approx(
        least + 0.25 * (heads.total(1.0) - least)
    )
    assert why is not None and why.startswith("the cheapest candidates cost 0.")
