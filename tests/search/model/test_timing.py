"""What a search times, and what its times decide."""

from __future__ import annotations

import re
import shutil

import pytest

import artifacts
from headwise.__main__ import main
from profiling.speed.baselines import HEADWISE, KERNEL
from profiling.speed.layer_times import ANCHOR, SDPA, Timings
from search.model import search
from search.model.record import build, write
from search.model.run import CHOSEN, SearchRun
from search.model.speed import another_round, prefill_seconds
from tests.search.model.conftest import (
    LENGTH,
    TIMED,
    Clock,
    content,
    interrupted,
    last_block,
    ledger_of,
    options,
)


@pytest.fixture(scope="module")
def gated(tiny_model, tmp_path_factory):
    """The resume file of a search by seconds that the gate has passed, and its clock."""
    out = tmp_path_factory.mktemp("gated") / "cfg.yaml"
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        clock.install(patch)
        patch.setattr(search, "time_attention", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(["search", *options(tiny_model, out, **TIMED)])
    return ledger_of(out), clock


@pytest.fixture
def timed(tiny_model, gated, tmp_path):
    """timed(*more): exit status of a search in which the timing of its result is left to do."""
    out = tmp_path / "cfg.yaml"
    shutil.copytree(gated[0], ledger_of(out))
    return lambda *more: main(["search", *options(tiny_model, out, *more, **TIMED)])


def test_seconds_cost_times_candidates_and_the_result(gated, timed, tmp_path, clock, capsys):
    """Dense attention takes ten times as long as patterns, and a full prefill twice as long."""
    assert timed() == 0
    out = tmp_path / "cfg.yaml"
    artifact = artifacts.load(out)
    assert artifact.search is not None and artifact.search.cost.unit == "seconds"
    assert artifact.prefill.dense_below == LENGTH // 2
    whole, *attention = artifact.evidence.measurements
    assert whole.name == "seconds to the first token"
    assert (whole.value, whole.baseline, whole.samples) == (1.0, 2.0, 6)
    assert whole.baseline_name == "dense attention by Headwise's kernel"
    assert [one.value for one in attention] == pytest.approx([3e-4] * 3)
    by_baseline = {one.baseline_name: one for one in attention}
    assert by_baseline["dense attention by sdpa"].baseline == pytest.approx(3e-3)
    # Three budgets, and some of every kind, on each layer.
    costs = gated[1].attention
    kinds = {name.partition("(")[0] for name in costs[0][1]}
    patterns = {"AShape", "VerticalSlash", "BlockSparse", "SkipSoftmax", "Dense"}
    assert len(costs) == 3 and kinds == {"0", "1", "2", ANCHOR} | patterns
    # Estimates of more queries are added to these times, so none of them uses more queries.
    assert not any("last_q=256" in name for name in costs[0][1])
    # The result, also on half the prompt.
    assert [names for _, names, _ in clock.attention[:2]] == [["chosen", ANCHOR, SDPA]] * 2
    assert [tokens for tokens, _, _ in clock.attention] == [LENGTH // 2, LENGTH] * 3
    # One turn is not counted where each length is timed first.
    warm_ups = [first for _, _, first in [*costs, *clock.attention]]
    assert warm_ups == [True, False, False, True, True, *[False] * 4]
    # Only against the fastest dense baseline, interleaved.
    assert clock.prefills == [[KERNEL, HEADWISE]] * 6
    block = last_block(capsys)
    assert block[0] == "result: faster"
    assert re.fullmatch(
        r"  first token 2\.00 s -> 1\.00 s, 2\.00x; at most .* more perplexity \(95% "
        r"confidence; measured .*\)",
        block[1],
    )
    assert re.fullmatch(r"  speedup of 2\.00x to .* in 6 rounds at 512 tokens", block[2])
    assert block[3] == "  attention alone: speedup 10.00x"
    assert block[4].startswith("budget asked 0.7, spent 0.")
    assert block[5].split()[:3] == ["budget", "first", "token"]
    assert block[-2].startswith(f"wrote {out}, ") and "headwise gate " in block[-1]
    assert artifact.evidence.verdict.proven
    # The time of another budget differs by its attention alone.
    (written,) = [point for point in artifact.search.frontier if point.measured]
    assert written.seconds == 1.0
    seconds = [point.seconds for point in artifact.search.frontier]
    assert len(seconds) > 1 and seconds == sorted(seconds)


def test_dense_prefill_is_timed_once(timed, clock, monkeypatch):
    def ask(config, run, *built):
        assert prefill_seconds(run) == prefill_seconds(run) == 2.0
        write(config, run, *built)

    monkeypatch.setattr(search, "write", ask)
    assert timed() == 0
    assert clock.prefills.count([KERNEL]) == 1


def test_attention_without_a_gain_leaves_the_old_file_and_times_no_prefill(
    found, timed, tmp_path, clock, capsys
):
    clock.sparse = clock.dense
    artifact, arrays = artifacts.load_pair(found)
    artifacts.save(artifact, tmp_path / "cfg.yaml", arrays)
    assert timed() == 3
    assert last_block(capsys)[0] == "result: too slow to serve; try a smaller --budget"
    assert content(tmp_path / "cfg.yaml") == content(found) and not clock.prefills


@pytest.fixture
def decided(timed, tiny_model, tmp_path, clock, monkeypatch, capsys):
    """decided(attention, first_token, *more): exit status and last block of a finished search whose
    times are replaced by these speedups; it is made once."""
    runs: list[SearchRun] = []

    def keep(config, run, *built):
        runs.append(run)
        write(config, run, *built)

    with monkeypatch.context() as patch:
        patch.setattr(search, "write", keep)
        assert timed() == 0
    (run,) = runs

    def finish(attention, first_token, *more, **changes):
        def measured(config):
            run.written = False
            seconds = {CHOSEN: 3e-3 / attention, ANCHOR: 3e-3, SDPA: 3e-3}
            run.attention = {LENGTH: Timings(seconds=seconds, layers=run.layers)}
            run.prefills = {KERNEL: first_token, HEADWISE: [1.0] * len(first_token)}
            write(config, run, *build(config, run))
            return run

        words = options(tiny_model, tmp_path / "new.yaml", *more, **TIMED | changes)
        with monkeypatch.context() as patch:
            patch.setattr(search, "run", measured)
            code = main(["search", *words])
        return code, last_block(capsys)

    return finish


def test_verdict_by_seconds_decides_on_the_file_and_the_exit_status(decided, tmp_path):
    out = tmp_path / "new.yaml"
    for attention, first_token, verdict, figure in (
        # Attention gains too little, or the full prefill is slower despite the gain.
        (1.04, (2.0, 2.0, 2.0), "too slow to serve", "speedup 1.04x"),
        (10, (0.98, 0.97, 0.99), "too slow to serve", "0.97x to 0.99x in 3 rounds"),
        # If the rounds disagree, no median decides, above or below 1.
        (10, (0.9, 1.2, 1.1), "not reliably faster", "0.90x to 1.20x in 3 rounds"),
        (10, (0.9, 0.95, 1.02), "not reliably faster", "0.90x to 1.02x in 3 rounds"),
    ):
        code, block = decided(attention, first_token)
        assert code == 3 and block[0].startswith(f"result: {verdict}; ")
        assert any(figure in line for line in block[1:4])
        written = verdict == "not reliably faster"
        assert ("--speed-only" in block[0]) == written == out.exists()
        assert f"wrote {out}" in block[-2] if written else "--keep" in block[-1]
        kept, block = decided(attention, first_token, "--keep")
        assert kept == 0 and verdict in block[0] and out.exists()
        out.unlink()
    # The model has 1,024 positions.
    _, block = decided(1.0, (2.0, 2.0, 2.0), budget=None)
    assert block[0] == "result: too slow to serve; try --length 1024"


def test_sdpa_slower_on_half_the_prompt_is_not_timed_on_all(timed, tmp_path, clock, capsys):
    clock.sdpa = 2.0
    assert timed() == 0
    calls = [(tokens, SDPA in names) for tokens, names, _ in clock.attention]
    assert calls[:2] == [(LENGTH // 2, True), (LENGTH, False)]
    assert not any(sdpa for tokens, sdpa in calls if tokens == LENGTH)
    _, *attention = artifacts.load(tmp_path / "cfg.yaml").evidence.measurements
    by_baseline = {one.baseline_name: one for one in attention}
    sdpa = by_baseline["dense attention by sdpa"]
    assert (sdpa.length, sdpa.baseline) == (LENGTH // 2, pytest.approx(6e-3))
    assert by_baseline["dense attention by Headwise's kernel"].length == LENGTH
    assert "default attention (sdpa): 2.00 times as long" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("done", "seconds", "limit", "another"),
    [
        (0, 0.0, 0.0, True),
        (2, 60.0, 1.0, True),
        (3, 90.0, 100.0, False),
        (3, 90.0, 120.0, True),
        (5, 5.0, 100.0, True),
        (6, 6.0, 100.0, False),
    ],
)
def test_prefill_rounds_are_three_or_more_within_the_limit(done, seconds, limit, another):
    assert another_round(done, seconds, limit) == another


def test_flops_cost_decides_by_count(tiny_model, tmp_path, capsys):
    out = tmp_path / "cfg.yaml"
    assert main(["search", *options(tiny_model, out, budget="0.99", task="prose")]) == 3
    result, gain, *_ = last_block(capsys)
    assert result == "result: too many FLOPs to serve; try a smaller --budget"
    assert re.fullmatch(
        r"  FLOPs .* 512 .* \d\.\d\d .* \(\d\.\d\dx fewer\), .* not timed; .*", gain
    )
    assert not list(out.parent.iterdir())
