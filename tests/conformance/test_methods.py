"""Conformance of methods and caches: every entry of both registries goes through every test here.

With dense prefill, only a streaming cache changes the attention of a prompt.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

import artifacts
from artifacts import Decode, HeadwiseError, OmniKV, Streaming
from kernels.index import TILE
from kernels.patterns import Inputs, make
from profiling.evaluation.cache_table import CACHES
from profiling.evaluation.matching import PatternCosts
from profiling.evaluation.method_table import (
    METHODS,
    check_name,
    markdown_table,
    method_names,
    says,
)
from profiling.evaluation.methods import Methods
from profiling.ledger import Ledger
from profiling.models.identity import identity_of
from runtime.memory import memory_report
from tests.profiling.conftest import folder, loaded, searched

__all__ = ["folder", "loaded", "searched"]

LENGTH = 900


def state(model):
    """Attention, hooks and attributes of a model that a method might leave changed."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return model.config._attn_implementation, hooks, [sorted(vars(m)) for m in model.modules()]


@pytest.fixture(scope="module")
def target_model(loaded, searched):
    """A model and its artifact with a dense tail and a decode section."""
    artifact = artifacts.load(searched / "cfg.yaml")
    prefill = artifact.prefill.model_copy(update={"dense_tail": 64})
    decode = Decode(omnikv=OmniKV(filter_layers=(0,), budget=100))
    return loaded, artifact.model_copy(update={"prefill": prefill, "decode": decode})


def test_methods_every_entry_runs_at_its_cost_and_leaves_the_model_unchanged(target_model):
    loaded, artifact = target_model
    methods, ids = Methods(loaded, artifact), torch.randint(0, 256, (1, LENGTH))
    target = methods.make("headwise", LENGTH).density
    assert target is not None and 0.5 < target < 0.9
    before = state(loaded.model)
    logits = {}
    names = method_names(artifact)
    for name in names:
        method = methods.make(name, LENGTH)
        with torch.no_grad(), method.apply(loaded.model):
            cache = method.cache(loaded.model)
            output = loaded.model(ids, past_key_values=cache, use_cache=True)
            step = loaded.model(ids[:, :1], past_key_values=output.past_key_values, use_cache=True)
        assert state(loaded.model) == before, name
        assert torch.isfinite(step.logits).all(), name
        logits[name] = output.logits
        kind = name.removesuffix("-tail")
        if kind in METHODS and METHODS[kind].has_tail and kind != "headwise":
            assert method.density is not None and method.density <= target, name
            assert method.density >= target - 0.25, name
        assert says(name)[0]
        check_name(name, names)
    with_tail = {name for name, spec in METHODS.items() if spec.has_tail}
    assert set(names) >= {*METHODS, *(f"{name}-tail" for name in with_tail)}
    assert {name.partition("+")[2] for name in names} >= set(CACHES) - {"own"}
    assert len({methods.make(name, LENGTH).identity for name in names}) == len(names)
    for name in names:
        prefill, _, cache_name = name.partition("+")
        usual = CACHES[cache_name].policy if cache_name else None
        streams = usual is not None and isinstance(usual(0.1, LENGTH), Streaming)
        same = prefill in ("dense", "dense_kernel") and not streams
        assert torch.allclose(logits[name], logits["dense"], atol=1e-3, rtol=1e-3) == same, name


def test_methods_sparse_ones_have_the_same_dense_tail_or_none(target_model):
    loaded, artifact = target_model
    methods = Methods(loaded, artifact)
    assert artifact.prefill.dense_tail == 64
    for name in METHODS.keys() - {"dense", "dense_kernel"}:
        for tail, own in ((64, name), (0, f"{name}-tail")):
            served = methods.make(own, LENGTH).headwise
            assert served is not None and served.artifact.prefill.dense_tail == tail, own
    target = methods.make("headwise", LENGTH).density
    less = methods.make("headwise-tail", LENGTH).density
    assert target is not None and less is not None and less < target
    prefill = artifact.prefill.model_copy(update={"dense_tail": 0})
    bare = Methods(loaded, artifact.model_copy(update={"prefill": prefill}))
    served = [bare.make(name, LENGTH).headwise for name in ("headwise", "a_shape", "a_shape-tail")]
    assert [each and each.artifact.prefill.dense_tail for each in served] == [0, 64, 0]


def test_methods_density_is_that_of_the_index(target_model):
    loaded, artifact = target_model
    own = Methods(loaded, artifact).make("a_shape", LENGTH).density
    less = Methods(loaded, artifact, density=0.6).make("a_shape", LENGTH).density
    assert own is not None and less is not None and 0.3 < less <= 0.6 < own
    costs, tail = PatternCosts(loaded, artifact, LENGTH), artifact.prefill.dense_tail
    q = torch.empty(1).expand(1, 1, LENGTH, 1)

    def sizes(n):
        return {"sink": n, "window": 4 * n}

    fields, density = costs.fit("a_shape", sizes, dense_tail=tail)
    pattern = make(**fields)
    mask = type(pattern).prepare([pattern], Inputs([0], q, q, 1.0))([pattern])
    assert density >= float(mask.density()) and density <= costs.target
    larger = make(kind=fields["kind"], **sizes(fields["sink"] + TILE))
    assert costs.density(larger, dense_tail=tail) > costs.target, "it could be larger"


def test_methods_with_fields_keep_what_they_say(target_model):
    loaded, artifact = target_model
    methods = Methods(loaded, artifact)
    kept = {
        "dense+snapkv:budget=0.25": 0.25,
        "headwise+snapkv:budget=90,window=16": 90 / LENGTH,
        "dense+random:budget=0.25": 0.25,
        "dense+h2o:heavy=0.125,recent=45": 0.125 + 45 / LENGTH,
        "dense+streaming:sinks=4,window=41": 45 / LENGTH,
        "headwise+omnikv:offload=packed": 100 / LENGTH,
    }
    for name, share in kept.items():
        method = methods.make(name, LENGTH)
        assert method.name == name and method.kept == pytest.approx(share), name
        assert method.headwise is not None
        plain = methods.make(name.partition(":")[0], LENGTH)
        assert method.identity != plain.identity, name
    section = methods.make("dense+streaming:sinks=4,window=41", LENGTH).headwise.artifact.kv_cache
    assert section.policies[section.layers[0]] == Streaming(sinks=4, window=41)
    # Times and memory are stored by identity, and depend on where keys and values are.
    places = [methods.make(f"headwise+omnikv:offload={at}", LENGTH) for at in ("never", "packed")]
    assert [each.offload for each in places] == ["never", "packed"]
    assert places[0].identity != places[1].identity


@pytest.mark.parametrize(
    ("name", "length", "tokens"),
    [
        # SnapKV keeps its window of 64 and another token, a short prompt whole.
        ("dense+snapkv", 300, 65),
        ("dense+snapkv", 64, 64),
        ("dense+snapkv", 1, 1),
        ("dense+random", 20, 20),
        ("dense+snapkv:budget=0.01", 900, 64),
        ("dense+snapkv:budget=0.01,window=4", 900, 9),
        ("dense+streaming", 10, 5),
        ("dense+streaming", 900, 180),
        ("dense+h2o", 900, 180),
    ],
)
def test_methods_with_caches_count_the_tokens_they_keep(target_model, name, length, tokens):
    loaded, artifact = target_model
    method = Methods(loaded, artifact).make(name, length)
    assert method.kept == pytest.approx(tokens / length)

    ids = torch.randint(0, 256, (1, length))
    with torch.no_grad(), method.apply(loaded.model):
        cache = method.cache(loaded.model)
        loaded.model(ids, past_key_values=cache, use_cache=True)
    assert {layer.mean_cached for layer in memory_report(cache).layers} == {tokens}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "unknown method 'nothing'; known here: dense, dense_kernel, "),
        ("dense+nothing:a=1", "unknown method .dense.nothing:a=1.; known"),
        ("headwise+h2o:heavy=0.1", "that cache decides how prompts are attended to"),
        ("dense+own", "unknown method .dense.own.; known"),
        ("dense+snapkv:", "unknown method .dense.snapkv:.; known"),
        ("dense+snapkv:budget", "'budget' must be FIELD=VALUE"),
        ("dense+snapkv:budget=70,budget=80", "'budget=80': give 'budget' once"),
        ("dense+snapkv:budget=2.5", "budget"),
        ("dense+snapkv:heavy=0.1", "heavy"),
        ("dense+omnikv:budget=3", r"'budget=3' must be offload=auto\|never\|packed"),
        ("dense+omnikv:offload=disk", "must be offload="),
    ],
)
def test_methods_refuse_unknown_names_and_fields(target_model, name, says):
    loaded, artifact = target_model
    with pytest.raises(HeadwiseError, match=says):
        Methods(loaded, artifact).make(name, LENGTH)


def test_methods_page_lists_every_entry():
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert markdown_table() in page, "python -m profiling.evaluation.method_table prints it"


def test_methods_sizes_are_read_from_the_ledger(target_model, tmp_path, monkeypatch):
    loaded, artifact = target_model
    model = identity_of(loaded.model, "tiny")
    ledger = Ledger(tmp_path / "evaluation.json", "evaluate", model)
    names = ("headwise", "vertical_slash", "a_shape")
    first = [Methods(loaded, artifact, ledger=ledger).make(name, LENGTH) for name in names]

    measured = mock.Mock(side_effect=RuntimeError("measured again"))
    monkeypatch.setattr("profiling.evaluation.methods.PatternCosts", measured)
    again = [Methods(loaded, artifact, ledger=ledger).make(name, LENGTH) for name in names]
    sizes = [(each.identity, each.density, each.sizes) for each in first]
    assert sizes == [(each.identity, each.density, each.sizes) for each in again]
    prefill = artifact.prefill.model_copy(update={"dense_tail": 200})
    other = artifact.model_copy(update={"prefill": prefill})
    with pytest.raises(RuntimeError, match="measured again"):
        Methods(loaded, other, ledger=ledger).make("a_shape", LENGTH)
