"""What serving says of itself: by layer and head, right in threads, and nothing at all where nobody asked."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from artifacts import HeadwiseError, SkipSoftmax
from kernels.attention import sparse_attention
from kernels.attention.recall import estimate_recall
from kernels.patterns import LayerPlan, make
from runtime import Headwise
from tests.runtime.conftest import SPARSE, served_by, sparse_rows
from tests.runtime.tiny import look_at_themselves


class Operations(TorchDispatchMode):
    """The names of torch's operations that run inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def captured(model: Any, prompt: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each layer in a plain forward pass."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        found.append((q, k, v))
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)

    with served_by(model, attention):
        model(prompt)
    return found


def test_layers_and_heads_are_as_their_indices_say(build, artifact_for, ids) -> None:
    model, prompt = build(num_hidden_layers=1), ids(300)
    ((q, k, v),) = captured(model, prompt)
    (row,) = sparse_rows(model.config)
    assert row is not None
    index = LayerPlan([make(**SPARSE[name]) for name in row], 2, dense_tail=64).build(q, k)
    recall = estimate_recall(q, k, v, index)[0]
    artifact = artifact_for(model)
    with Headwise(artifact).apply(model, backend="reference", watch=True) as handle:
        model(ids(50))
        for _ in range(2):
            model(prompt)
        (layer,) = handle.stats()["layers"].values()
    assert handle.stats()["sparse"] == 2 and handle.stats()["dense"] == {"short": 1}
    assert layer["calls"] == {"sparse": 2, "dense": {"short": 1}}
    assert (layer["sequences"], layer["first_head"], layer["fallbacks"]) == (2, 0, [0] * 4)
    assert set(layer["seconds"]) == {"build", "attention", "estimate"} and min(layer["seconds"].values()) > 0
    tail = artifact.prefill.dense_tail
    density = LayerPlan([make(**SPARSE[name]) for name in row], 2, dense_tail=tail).build(q, k).density()[0]
    assert layer["density"] == pytest.approx(density.tolist(), rel=1e-5)
    assert layer["recall"] == pytest.approx(recall.tolist(), rel=1e-4)
    assert layer["lowest_recall"] == pytest.approx(recall.tolist(), rel=1e-4)


def test_watching_changes_no_output(build, apply, ids) -> None:
    model, prompt = build(), ids(300, batch=2)
    real = torch.ones_like(prompt)
    real[0, :100] = 0
    outputs = []
    for watch in (False, True):
        with apply(model, watch=watch) as handle:
            outputs.append(model(prompt, attention_mask=real).logits)
    assert torch.equal(*outputs)
    assert [layer["sequences"] for layer in handle.stats()["layers"].values()] == [2, 2]


def test_not_watching_runs_what_it_ran_before(build, artifact_for, ids) -> None:
    """No operation, counted one by one, is there that the patterns and their attention do not need."""
    model, prompt = build(num_hidden_layers=1), ids(300)
    ((q, k, v),) = captured(model, prompt)
    artifact = artifact_for(model)
    runs: dict[str, list[str]] = {}
    for name, options in {"off": {}, "on": {"watch": True}}.items():
        with Headwise(artifact).apply(model, backend="reference", **options), Operations() as ran:
            model(prompt)
        runs[name] = ran.names
    with Operations() as needed:
        from kernels.attention import sparse_attention

        (row,) = sparse_rows(model.config)
        plan = LayerPlan([make(**SPARSE[name]) for name in row or ()], 2, dense_tail=artifact.prefill.dense_tail)
        plan.build(q, k)
        sparse_attention(q, k, v, plan.build(q, k), backend="reference")
    with Operations() as built:
        plan.build(q, k)
    with Operations() as dense:
        model(prompt)
    attention = len(needed.names) - len(built.names)
    sdpa = sum("scaled_dot_product" in name for name in dense.names)
    assert sdpa == 1 and not any("scaled_dot_product" in name for name in runs["off"])
    extra = len(runs["off"]) - (len(dense.names) - sdpa) - attention
    assert extra <= 2, "a view of keys and one of values at most"
    assert len(runs["on"]) > len(runs["off"]) + 10


def test_the_code_that_watches_is_not_even_loaded(tmp_path: Path) -> None:
    code = """
import sys, torch
import runtime.applied, runtime.attention, runtime.headwise
print(*(name for name in ("runtime.watch", "kernels.attention.recall") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("left", [True, False])
def test_heads_below_the_bound_are_dense_and_counted(left: bool, build, apply, masked, ids) -> None:
    model, prompt = build(), ids(300, batch=2)
    real = torch.ones_like(prompt)
    real[0, slice(0, 90) if left else slice(210, None)] = 0
    expected = model(prompt, attention_mask=real).logits
    with apply(model, min_recall=1.0) as handle:
        found = model(prompt, attention_mask=real).logits
        layers = handle.stats()["layers"]
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], atol=2e-4, rtol=1e-3)
    assert sum(sum(layer["fallbacks"]) for layer in layers.values()) >= 8
    with apply(model) as handle:
        sparse = model(prompt, attention_mask=real).logits
        assert "layers" not in handle.stats()
    with apply(model, min_recall=1e-6) as handle:
        assert torch.equal(model(prompt, attention_mask=real).logits, sparse)
        assert sum(sum(layer["fallbacks"]) for layer in handle.stats()["layers"].values()) == 0


def test_only_heads_below_the_bound_change(build, apply, ids) -> None:
    model, prompt = build(num_hidden_layers=1), ids(300)
    with apply(model, watch=True) as handle:
        model(prompt)
        (seen,) = handle.stats()["layers"].values()
    bound = (sorted(seen["recall"])[1] + sorted(seen["recall"])[2]) / 2
    with apply(model, min_recall=bound) as handle:
        model(prompt)
        (layer,) = handle.stats()["layers"].values()
    below = [recall < bound for recall in seen["recall"]]
    assert layer["fallbacks"] == [int(low) for low in below] and sum(below) == 2
    for low, before, after in zip(below, seen["density"], layer["density"], strict=True):
        assert after == (1.0 if low else pytest.approx(before))


@pytest.mark.parametrize("bound", [0, -1, 1.5, float("nan"), "0.9"])
def test_a_bound_that_is_no_share_is_refused(bound: Any, build, apply) -> None:
    model = build()
    with pytest.raises(HeadwiseError, match="min_recall must be above 0 and at most 1, got"):
        apply(model, min_recall=bound)
    assert model.config._attn_implementation == "sdpa"


def test_threads_lose_no_call(build, apply, ids) -> None:
    model = build()
    prompts = [ids(n, seed=n) for n in (130, 140, 150, 50)] * 6
    with apply(model, backend="auto", watch=True) as handle:

        def run(prompt: Tensor) -> Tensor:
            with torch.inference_mode():
                return model(prompt).logits

        alone = [run(prompt) for prompt in prompts]
        before = handle.stats()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(4) as pool:
                together = list(pool.map(run, prompts))
        finally:
            sys.setswitchinterval(interval)
        after = handle.stats()
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)
    assert before["sparse"] == 36 and after["sparse"] == 72
    assert before["dense"] == {"short": 12} and after["dense"] == {"short": 24}
    for number, layer in after["layers"].items():
        assert layer["sequences"] == 2 * before["layers"][number]["sequences"] == 36
        assert layer["recall"] == pytest.approx(before["layers"][number]["recall"], rel=1e-6)


def test_what_skip_softmax_skips_is_counted(build, artifact_for, ids) -> None:
    """By sequence, of its own causal tiles; and the output is that of nobody watching."""
    model, prompt = build(num_hidden_layers=1), ids(400, batch=2)
    look_at_themselves(model)
    real = torch.ones_like(prompt)
    real[0, :100] = 0
    pattern = SkipSoftmax(scale_factor=299.0)
    made = artifact_for(model, dense=True)
    artifact = made.model_copy(
        update={
            "patterns": {"skip_299": pattern},
            "prefill": made.prefill.model_copy(update={"layers": (("skip_299",) * 4,)}),
        }
    )
    with torch.no_grad():
        with Headwise(artifact).apply(model):
            unwatched = model(prompt, attention_mask=real).logits
        with Headwise(artifact).apply(model, watch=True) as handle:
            assert torch.equal(model(prompt, attention_mask=real).logits, unwatched)
    (layer,) = handle.stats()["layers"].values()
    shares = torch.zeros(4)
    for row, start in ((0, 100), (1, 0)):
        # Rotary positions of a padded sequence may begin anywhere: only differences count.
        ((q, k, v),) = captured(model, prompt[row : row + 1, start:])
        index = LayerPlan([make("skip_softmax", scale_factor=299.0)] * 4, 2).build(q, k)
        skipped = torch.zeros(1, 4, dtype=torch.int32)
        sparse_attention(q, k, v, index, backend="reference", skipped=skipped)
        shares += skipped[0] / index.causal_tiles / 2
    assert float(shares.max()) > 0
    assert layer["skipped"] == pytest.approx(shares.tolist(), abs=1e-6) and layer["density"] == [1.0] * 4
