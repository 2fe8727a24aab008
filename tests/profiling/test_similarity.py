"""The profile equals full attention weights, marks sliding-window layers, and comes back."""

from __future__ import annotations

import csv
import math
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from artifacts import HeadwiseError
from headwise.__main__ import main
from profiling.inside.residual import ResidualStream
from profiling.models.loading import LoadedModel, load_model
from profiling.similarities.accumulator import FROZEN, WORST, Accumulator
from profiling.similarities.config import TAIL, SimilarityConfig
from profiling.similarities.layer_similarity import measure
from profiling.similarities.mass import ability, agreement
from profiling.similarities.similarity_profile import FILE, Profile, save_profile
from profiling.similarities.similarity_profile import load_profile as load
from tests.profiling.pictures import random_profile
from tests.typed import make_prompts

LENGTH, STEPS, TOP = 980, 20, 100
SMALL: dict[str, Any] = {"length": 400, "steps": 4}


def config(task: str, **changes: Any) -> SimilarityConfig:
    fields = {"model": "tiny", "samples": 1, "dtype": "float32", "length": LENGTH, "steps": STEPS}
    return SimilarityConfig(tasks=(task,), **{**fields, "top_k": TOP, **changes})


def plainly(loaded: LoadedModel, task: str, seed: int) -> dict[str, np.ndarray]:
    """Arrays from eager attention weights by the definitions, in fp64."""
    prompt = make_prompts(task, loaded.tokenizer, length=LENGTH, samples=1, seed=seed)[0]
    continuation, blocks = [], []
    for find in prompt.evidence:
        for text, span in ((find.lead, None), (find.expected, find.span)):
            ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
            continuation += ids
            blocks += [span] * len(ids)
    assert len(continuation) >= STEPS
    ids = torch.tensor([[*prompt.input_ids, *continuation[: STEPS - 1]]])
    loaded.model.set_attn_implementation("eager")
    wanted = dict.fromkeys(("output_attentions", "output_hidden_states", "use_cache"), True)
    with torch.no_grad():
        output = loaded.model(ids, **wanted)
    weights, streams, cache = output.attentions, output.hidden_states, output.past_key_values
    loaded.model.set_attn_implementation("sdpa")
    n, old, groups = len(weights), LENGTH - 1 - TAIL, cache.layers[0].values.shape[1]
    rows = np.stack([w[0].double().numpy() for w in weights])[:, :, -STEPS - TAIL :]
    mass = np.zeros((n, n))
    hit, missed = [], np.zeros((n, STEPS))
    error = np.full((STEPS, n, n, groups), np.nan)
    for step in range(STEPS):
        row = rows[:, :, TAIL + step, : LENGTH + step]
        top = np.argsort(-row.max(1), axis=1)[:, :TOP]
        for i in range(n):
            mass[i] += row.mean(1)[:, top[i]].sum(1) / STEPS
        if blocks[step] is not None:
            span = range(*blocks[step])
            hit.append([np.isin(span, top[i]).mean() for i in range(n)])
        for i, j in zip(*np.triu_indices(n), strict=True):
            values = cache.layers[j].values[0].double().numpy()[:, : LENGTH + step]
            by_head = row[j].reshape(groups, -1, LENGTH + step)
            stream = streams[j][0, LENGTH - 1 + step].double().numpy()
            project = loaded.model.model.layers[j].self_attn.o_proj.weight.detach().double().numpy()
            seen = np.zeros(LENGTH + step)
            seen[np.argsort(-row[i].max(0))[:TOP]] = 1
            for g in range(groups):
                sparse = by_head[g] * seen
                change = (sparse / sparse.sum(1, keepdims=True) - by_head[g]) @ values[g]
                written = np.split(project, groups, axis=1)[g] @ change.ravel()
                error[step, i, j, g] = (written @ written) / (stream @ stream)
        for i in range(n):
            ranked = rows[i, :, :TAIL, :old].max(0).sum(0)
            frozen = np.argsort(-ranked)[: math.ceil(FROZEN * LENGTH)]
            missed[i, step] = row[i].mean(0)[np.setdiff1d(np.arange(old), frozen)].sum()
    return {
        f"mass.{task}": mass,
        f"hit.{task}": np.mean(hit, axis=0),
        f"variability.{task}": missed,
        f"error.{task}": error.mean(0),
        f"worst.{task}": np.sort(error, axis=0)[-math.ceil(WORST * STEPS) :].mean(0),
    }


def test_measure_equals_full_attention_weights(loaded):
    task = "multi_hop"
    profile = measure(config(task, seed=3), loaded)
    for name, expected in plainly(loaded, task, seed=3).items():
        fine = name.startswith(("error", "worst"))
        close = {"rtol": 1e-3, "atol": 1e-6} if fine else {"atol": 1e-3}
        np.testing.assert_allclose(profile.arrays[name], expected, err_msg=name, **close)
    mass = profile.mass(task)
    assert mass.min() > 0.02 and mass.max() < 0.999, "a case in which nothing could go wrong"
    assert profile.layers == [0, 1, 2] and profile.sliding_layers == []
    np.testing.assert_allclose(profile.ability(task)[0], mass[0, 1:].mean(), rtol=1e-6)


def test_measure_leaves_out_sliding_layers(hybrid):
    task = "passkey"
    profile = measure(config(task, **SMALL), load_model(str(hybrid), dtype="float32"))
    assert profile.layers == [1, 4] and profile.sliding_layers == [0, 2, 3]
    measured = np.zeros((5, 5), dtype=bool)
    measured[np.ix_([1, 4], [1, 4])] = True
    np.testing.assert_array_equal(np.isfinite(profile.mass(task)), measured)
    np.testing.assert_array_equal(np.isfinite(profile.variability(task)[:, 0]), measured.any(1))
    expected = [np.nan, profile.mass(task)[1, 4], np.nan, np.nan, np.nan]
    np.testing.assert_array_equal(profile.ability(task), expected)


def test_residual_stream_gain_includes_the_norm(hybrid, loaded):
    """Gemma's blocks add not the attention's output but a norm of it, however large it is."""
    gemma = load_model(str(hybrid), dtype="float32").model
    block = gemma.model.layers[1]
    seen = {}

    def remember(name, output):
        seen[name] = output[0, -1]

    attention, norm = block.self_attn, block.post_attention_layernorm
    ids = torch.randint(3, 90, (1, 40))
    with (
        attention.register_forward_hook(lambda _, __, out: remember("attention", out[0])),
        norm.register_forward_hook(lambda _, __, out: remember("added", out)),
        torch.no_grad(),
        ResidualStream(gemma) as stream,
    ):
        gemma(ids)
    gain = seen["added"].square().sum() / seen["attention"].square().sum()
    assert abs(gain - 1) > 0.1
    torch.testing.assert_close(stream.gain(1), gain)

    def hooks():
        modules = loaded.model.modules()
        return [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules]

    before = hooks()
    with torch.no_grad(), ResidualStream(loaded.model) as plain:
        loaded.model(ids)
    assert [float(plain.gain(layer)) for layer in range(3)] == [1, 1, 1]
    assert hooks() == before


def test_measure_of_a_text_is_teacher_forced_or_greedy(loaded, tmp_path):
    text = tmp_path / "a b.txt"
    text.write_text(" ".join(f"{i} of many numbered words" for i in range(400)))
    forced = measure(config(f"text:{text}"), loaded)
    greedy = measure(config(f"text:{text}", greedy=True), loaded)
    assert forced.tasks == ["text:a b.txt"] and forced.hit("text:a b.txt") is None
    first = "variability.text:a b.txt"
    np.testing.assert_allclose(forced.arrays[first][:, 0], greedy.arrays[first][:, 0])
    assert np.abs(forced.arrays[first] - greedy.arrays[first]).max() > 1e-4


def test_similarity_command_writes_a_profile_and_tables(folder, tmp_path):
    out = tmp_path / "new" / "profile"
    words = f"--model {folder} --out {out} --length 900 --steps 3 --samples 1 --task passkey"
    main(["similarity", *f"{words} --task kv_retrieval --dtype float32 --top-k 50".split()])
    profile = load(out)
    assert profile.tasks == ["passkey", "kv_retrieval"] and profile.agreement.shape == (2, 2)
    assert profile.about["command"].startswith("headwise similarity --model")
    assert all(re.fullmatch("[0-9a-f]{64}", task["sha256"]) for task in profile.about["tasks"])
    for name in ("mass.passkey", "worst.passkey", "ability.passkey.next8", "agreement"):
        with (out / f"{name}.csv").open() as file:
            header, *rows = list(csv.reader(file))
        array = profile.arrays[name].reshape(len(rows), -1)
        assert len(header) == 1 + array.shape[1]
        labels = profile.tasks if name == "agreement" else ["0", "1", "2"]
        assert [row[0] for row in rows] == labels
        read = np.array([[float(cell or "nan") for cell in row[1:]] for row in rows])
        np.testing.assert_allclose(read, array, rtol=1e-5)


def test_load_profile_refuses_other_files(tmp_path):
    file = tmp_path / FILE
    with pytest.raises(HeadwiseError, match=str(tmp_path)):
        load(tmp_path)
    file.write_bytes(b"nothing of the sort")
    with pytest.raises(HeadwiseError, match=FILE):
        load(file)
    profile = random_profile(2)
    bare = {name: array for name, array in profile.arrays.items() if name != "mass.passkey"}
    longer = profile.arrays | {"variability.passkey": np.zeros((2, 4))}
    for arrays, change, said in (
        (profile.arrays, {"format": 99}, "that this release reads"),
        (bare, {}, "mass.passkey"),
        (longer, {}, "variability.passkey"),
    ):
        save_profile(Profile(arrays=arrays, about=profile.about | change), tmp_path)
        with pytest.raises(HeadwiseError, match=said):
            load(file)
    save_profile(profile, tmp_path)
    back = load(tmp_path).ability("passkey")
    np.testing.assert_array_equal(back, profile.ability("passkey").astype(np.float32))
    assert load(tmp_path).about == profile.about


def test_measure_holds_one_layer_at_a_time(loaded, monkeypatch):
    held = []
    visit = Accumulator.visit

    def watched(self, step, inputs):
        assert all(former() is None for former in held)
        held[:] = [weakref.ref(inputs.probabilities)]
        visit(self, step, inputs)

    monkeypatch.setattr(Accumulator, "visit", watched)
    measure(config("passkey", **SMALL), loaded)
    assert held


def test_ability_is_the_mean_over_the_next_layers():
    mass = np.arange(16, dtype=np.float64).reshape(4, 4)
    assert ability(mass, 2)[:3].tolist() == [1.5, 6.5, 11.0] and np.isnan(ability(mass, 2)[3])
    mass[:, 1] = mass[1] = np.nan
    np.testing.assert_array_equal(ability(mass, 2), [2, np.nan, 11, np.nan])
    np.testing.assert_array_equal(ability(mass, 1), [np.nan, np.nan, 11, np.nan])


def test_agreement_is_the_correlation_above_the_diagonal():
    random = np.random.default_rng(0)
    base = random.random((5, 5))
    below = base + np.tril(random.random((5, 5)))
    opposite = -2 * base
    other = random.random((5, 5))
    result = agreement([base, below, opposite, other])
    np.testing.assert_allclose(result[0, :3], [1, 1, -1])
    upper = np.triu_indices(5, 1)
    assert result[0, 3] == pytest.approx(np.corrcoef(base[upper], other[upper])[0, 1])
    for mass in (base, other):
        mass[2] = mass[:, 2] = np.nan
    assert np.isfinite(agreement([base, other])).all()
    # Too few layers to agree.
    lone = np.full((3, 3), np.nan)
    lone[0, 2] = 0.5
    assert np.isnan(agreement([lone, lone])).all() and agreement([lone]).shape == (1, 1)
