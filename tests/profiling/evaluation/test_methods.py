"""The methods of an evaluation: at one cost, as they are told to be, each served by the runtime."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

import artifacts
from artifacts import Decode, OmniKV
from kernels.attention import sparse_attention
from kernels.index import TILE
from kernels.patterns import Inputs, LayerPlan, make
from profiling.evaluation.matching import SIZES, PatternCosts, tile_gaps
from profiling.evaluation.method_table import METHODS, method_names, says
from profiling.evaluation.methods import Methods
from profiling.inside.capture import LayerInputs
from profiling.ledger import Ledger
from tests.kernels.test_ops import unlike_tiles
from tests.runtime.tiny import look_at_themselves

LENGTH = 900


@pytest.fixture(scope="module")
def made(loaded, searched):
    artifact = artifacts.load(searched / "cfg.yaml")
    prefill = artifact.prefill.model_copy(update={"dense_tail": 64})
    decode = Decode(omnikv=OmniKV(filter_layers=(0,), budget=100))
    return loaded, artifact.model_copy(update={"prefill": prefill, "decode": decode})


def test_every_method_runs_at_what_it_says_it_costs(made):
    loaded, artifact = made
    methods, ids = Methods(loaded, artifact), torch.randint(0, 256, (1, LENGTH))
    target = methods.make("headwise", LENGTH).density
    assert target is not None and 0.5 < target < 0.9
    found = {}
    for name in method_names(artifact):
        method = methods.make(name, LENGTH)
        with torch.no_grad(), method.apply(loaded.model):
            cache = method.cache(loaded.model)
            output = loaded.model(ids, past_key_values=cache, use_cache=True)
            step = loaded.model(ids[:, :1], past_key_values=output.past_key_values, use_cache=True)
        assert torch.isfinite(step.logits).all(), name
        found[name] = output.logits
        kind = name.removesuffix("-tail")
        if kind in METHODS and METHODS[kind].sizes:
            # A random model's tiles score alike: no threshold tells them apart.
            low, high = (0.95, 1.0) if kind == "skip_softmax" else (target - 0.25, target)
            assert method.density is not None and low <= method.density <= high, name
        assert says(name)[0]
    assert {f"{name}-tail" for name in METHODS} - {"dense-tail", "dense_kernel-tail"} < set(found)
    torch.testing.assert_close(found["dense_kernel"], found["dense"], atol=1e-3, rtol=1e-3)
    for name in ("headwise", "headwise-tail", "a_shape", "a_shape-tail", "dense+streaming"):
        assert not torch.allclose(found[name], found["dense"], atol=1e-3), name
    for name in ("dense+snapkv", "dense+random", "dense+h2o", "dense+omnikv"):
        torch.testing.assert_close(found[name], found["dense"], atol=1e-3, rtol=1e-3)
    assert len({methods.make(name, LENGTH).identity for name in found}) == len(found)


def test_every_sparse_method_has_the_same_dense_tail_or_none(made):
    loaded, artifact = made
    methods = Methods(loaded, artifact)
    assert artifact.prefill.dense_tail == 64
    ids = torch.randint(0, 256, (1, LENGTH))

    def logits(name):
        with torch.no_grad(), methods.make(name, LENGTH).apply(loaded.model):
            return loaded.model(ids).logits

    for name in METHODS.keys() - {"dense", "dense_kernel"}:
        if METHODS[name].chosen:
            tailed, without = logits(name), logits(f"{name}-tail")
            assert not torch.allclose(tailed[:, -64:], without[:, -64:], atol=1e-4), name
            continue
        for tail, own in ((64, name), (0, f"{name}-tail")):
            served = methods.make(own, LENGTH).headwise
            assert served is not None and served.artifact.prefill.dense_tail == tail, own
    target = methods.make("headwise", LENGTH).density
    less = methods.make("headwise-tail", LENGTH).density
    assert target is not None and less is not None and less < target
    prefill = artifact.prefill.model_copy(update={"dense_tail": 0})
    bare = Methods(loaded, artifact.model_copy(update={"prefill": prefill}))
    served = [bare.make(name, LENGTH).headwise for name in ("headwise", "a_shape", "a_shape-tail")]
    assert [made and made.artifact.prefill.dense_tail for made in served] == [0, 64, 0]


def test_the_density_of_a_method_is_what_its_index_computes(made):
    loaded, artifact = made
    own = Methods(loaded, artifact).make("a_shape", LENGTH).density
    less = Methods(loaded, artifact, density=0.6).make("a_shape", LENGTH).density
    assert own is not None and less is not None and 0.3 < less <= 0.6 < own
    costs, tail = PatternCosts(loaded, artifact, LENGTH), artifact.prefill.dense_tail
    q = torch.empty(1).expand(1, 1, LENGTH, 1)
    fields, density = costs.fit("a_shape", dense_tail=tail)
    pattern = make(**fields)
    mask = type(pattern).prepare([pattern], Inputs([0], q, q, 1.0))([pattern])
    assert density >= float(mask.density()) and density <= costs.target
    larger = make(kind=fields["kind"], **SIZES["a_shape"].at(fields["sink"] + TILE))
    assert costs.density(larger, dense_tail=tail) > costs.target, "it could be larger"


def test_one_threshold_keeps_as_many_tiles_as_are_asked_for(made):
    loaded, artifact = made
    model = copy.deepcopy(loaded.model)
    look_at_themselves(model)
    costs = PatternCosts(replace(loaded, model=model), artifact, LENGTH)
    fields, density = costs.fit("skip_softmax", dense_tail=64, target=0.95)
    assert fields["kind"] == "skip_softmax" and 0.9 < density <= 0.95
    lower = make("skip_softmax", scale_factor=fields["scale_factor"] * 0.97)
    assert costs.density(lower, dense_tail=64) > 0.95, "the threshold could be lower"


def test_what_was_found_is_remembered(made, tmp_path, monkeypatch):
    loaded, artifact = made
    ledger = Ledger(tmp_path / "evaluation.json", "evaluate")
    names = ("headwise", "vertical", "a_shape")
    first = [Methods(loaded, artifact, ledger=ledger).make(name, LENGTH) for name in names]

    # A second pass over the prompt is none that can be made.
    monkeypatch.setattr("profiling.evaluation.methods.PatternCosts", None)
    again = [Methods(loaded, artifact, ledger=ledger).make(name, LENGTH) for name in names]
    kept = [(each.identity, each.density, each.sizes) for each in first]
    assert kept == [(each.identity, each.density, each.sizes) for each in again]
    prefill = artifact.prefill.model_copy(update={"dense_tail": 200})
    other = artifact.model_copy(update={"prefill": prefill})
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        Methods(loaded, other, ledger=ledger).make("a_shape", LENGTH)


@pytest.mark.parametrize(("length", "softcap"), [(40, None), (450, None), (700, 15.0)])
def test_a_threshold_skips_what_is_below_it(length, softcap):
    q, k, v = unlike_tiles(length, heads=4, kv_heads=2)
    layer = LayerInputs(
        layer=0, q=q, k=k, v=v, scale=0.2, softcap=softcap, sliding_window=None, sinks=None
    )
    gaps, rows = tile_gaps(layer)
    for factor in (5.0, 30.0, 200.0):
        index = LayerPlan([make("skip_softmax", scale_factor=factor)] * 4, 2, dense_tail=70).build(
            q, k
        )
        skipped = torch.zeros(1, 4, dtype=torch.int32)
        sparse_attention(
            q, k, v, index, scale=0.2, softcap=softcap, backend="reference", skipped=skipped
        )
        bound = math.log(factor / length) if factor < length else -math.inf
        below = (gaps < bound) & (rows < index.dense_from())
        assert below.sum(-1).tolist() == skipped[0].tolist()
        assert gaps.shape[1] == index.causal_tiles
