"""The curves of heads against plain softmax over the whole matrix and the output projection in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from artifacts import HeadwiseError
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import attend
from profiling.inside.loss_gradients import loss_gradients
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Prompt
from profiling.quality.logits import DenseLogits
from runtime.layers import attention_layers, sliding_layers
from search.curves import Curves, score_prompt
from search.ladder import ladder
from tests.runtime.tiny import FAMILIES, tiny_model
from tests.search.conftest import save_tiny

LENGTH = 700
TAIL = 64
CANDIDATES = (
    make("a_shape", sink=64, window=20),
    make("vertical_slash", vertical=70, slash=70, last_q=64),
    make("vertical_slash", vertical=70, slash=80, last_q=256),
    make("vertical_slash", vertical=150, slash=150, last_q=64, coverage=0.9),
    make("block_sparse", blocks=2),
    make("block_sparse", blocks=4, coverage=0.9),
    make("dense"),
)


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    generator = torch.Generator().manual_seed(1)
    return Prompt(tuple(torch.randint(0, 250, (LENGTH,), generator=generator).tolist()), None)


def curves_of(loaded: LoadedModel, prompt: Prompt, **changes: Any) -> Curves:
    options = {"layers": 3, "dense_tail": TAIL, "backend": "auto"} | changes
    return score_prompt(loaded, prompt, CANDIDATES, **options)


def direct(loaded: LoadedModel, prompt: Prompt) -> dict[int, dict[str, np.ndarray]]:
    """By layer: change of what each head writes (H, C), without a norm after it, error, recall and tiles."""
    found: dict[int, dict[str, np.ndarray]] = {}
    streams: dict[int, Tensor] = {}
    blocks = loaded.model.model.layers

    def entering(layer: int) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            streams[layer] = (args[0] if args else kwargs["hidden_states"])[0].double()

        return hook

    def visit(inputs: LayerInputs) -> None:
        if inputs.sliding_window is not None:
            return
        heads, group = inputs.q.shape[1], inputs.q.shape[1] // inputs.k.shape[1]
        q, k, v = (x[0].double() for x in (inputs.q, inputs.k, inputs.v))
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        logits = (q @ k.transpose(1, 2) * inputs.scale).masked_fill(
            ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), float("-inf")
        )
        weights = logits.softmax(-1)
        written = blocks[inputs.layer].self_attn.o_proj.weight.double()
        measures = {name: np.empty((heads, len(CANDIDATES))) for name in ("change", "error", "recall", "tiles")}
        for c, pattern in enumerate(CANDIDATES):
            plan = LayerPlan([pattern] * heads, inputs.k.shape[1], dense_tail=TAIL)
            index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
            kept = index.to_mask()[0]
            delta = logits.masked_fill(~kept, float("-inf")).softmax(-1) @ v - weights @ v
            dim = delta.shape[-1]
            for head in range(heads):
                added = delta[head] @ written[:, head * dim : (head + 1) * dim].T
                size = streams[inputs.layer].square().sum(-1)
                measures["change"][head, c] = (added.square().sum(-1) / size).mean()
            measures["error"][:, c] = delta.norm(dim=(1, 2)) / (weights @ v).norm(dim=(1, 2))
            measures["recall"][:, c] = (weights * kept).sum(-1).mean(-1)
            measures["tiles"][:, c] = index.computed_tiles()[0]
        found[inputs.layer] = measures

    handles = [b.register_forward_pre_hook(entering(i), with_kwargs=True) for i, b in enumerate(blocks)]
    capture(loaded.model, torch.tensor([prompt.input_ids]), visit)
    for handle in handles:
        handle.remove()
    return found


def test_all_measures_are_those_of_the_whole_matrix(tiny_model: Path, prompt: Prompt) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    curves, expected = curves_of(loaded, prompt), direct(loaded, prompt)
    assert curves.searched.tolist() == [True] * 3
    for layer, measures in expected.items():
        for name in ("change", "error", "recall"):
            np.testing.assert_allclose(
                getattr(curves, name)[layer], measures[name], rtol=2e-3, atol=1e-6, err_msg=f"{name} of layer {layer}"
            )
        np.testing.assert_array_equal(curves.tiles[layer], measures["tiles"])
    # What computes everything changes nothing; the others do.
    assert curves.change[..., -1].max() < 1e-9 < curves.change[..., 0].min()


def test_layers_that_slide_are_left_out_and_a_norm_behind_attention_counts(tmp_path: Path, prompt: Prompt) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"head_dim": 16, "sliding_window": 64, "layer_types": layers}
    model = save_tiny(tmp_path / "hybrid", family="Gemma3", config="Gemma3Text", **sizes)
    loaded = load_model(str(model), dtype="float32")
    block = loaded.model.model.layers[1]
    block.post_attention_layernorm.weight.data += 3
    ends: list[float] = []
    norm = block.post_attention_layernorm
    handle = norm.register_forward_hook(
        lambda module, args, output: ends.append(
            float(output[0, -1].detach().norm() ** 2 / args[0][0, -1].detach().norm() ** 2)
        )
    )
    curves = curves_of(loaded, prompt)
    handle.remove()
    assert curves.searched.tolist() == [False, True, False]
    assert all(np.isnan(getattr(curves, name)[[0, 2]]).all() for name in ("change", "error", "recall", "tiles"))
    expected = direct(loaded, prompt)[1]["change"]
    # The last pass, after those that take gradients.
    assert abs(ends[-1] - 1) > 0.1
    np.testing.assert_allclose(curves.change[1], expected * ends[-1], rtol=3e-3, atol=1e-6)


def test_what_a_change_does_to_the_loss_is_told_to_first_and_second_order(tiny_model: Path, prompt: Prompt) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    curves = curves_of(loaded, prompt)
    ids = torch.tensor([prompt.input_ids])
    gradients = loss_gradients(loaded.model, ids)
    assert gradients is not None and int(curves.tokens) == LENGTH
    found: list[LayerInputs] = []
    capture(loaded.model, ids, found.append)
    for inputs in found:
        gradient = gradients[inputs.layer].double()
        dense = attend(inputs, dense_index(1, inputs.q.shape[1], LENGTH, LENGTH, inputs.q.device), "reference")[0][0]
        for c in (0, 4):
            plan = LayerPlan([CANDIDATES[c]] * inputs.q.shape[1], inputs.k.shape[1], dense_tail=TAIL)
            out = attend(inputs, plan.build(inputs.q, inputs.k, scale=inputs.scale), "reference")[0][0]
            lost = (gradient * (out - dense).double().transpose(0, 1)).sum(-1)
            groups = torch.nn.functional.pad(lost, (0, 0, 0, -LENGTH % 64)).unflatten(0, (-1, 64)).sum(1)
            np.testing.assert_allclose(curves.drop[inputs.layer, :, c], lost.mean(0), rtol=2e-2, atol=1e-7)
            expected = groups.square().sum(0) / LENGTH / 2
            np.testing.assert_allclose(curves.divergence[inputs.layer, :, c], expected, rtol=2e-2, atol=1e-9)
    # A prompt that asks for an answer is no text.
    asked = curves_of(loaded, Prompt(prompt.input_ids, "42"))
    assert int(asked.tokens) == 0 and not asked.drop.any()
    np.testing.assert_allclose(asked.divergence, curves.divergence, rtol=1e-4)


def test_what_a_budget_makes_small() -> None:
    rng = np.random.default_rng(0)

    def made(tokens: int) -> Curves:
        change, divergence, drop = rng.random((2, 3, 4)), rng.random((2, 3, 4)), rng.normal(size=(2, 3, 4))
        some = {"error": change, "recall": change, "tiles": change}
        return Curves(change=change, divergence=divergence, drop=drop * bool(tokens), tokens=np.array(tokens), **some)

    text, asked = made(30_000), made(0)
    np.testing.assert_allclose(Curves.mean([text, asked]).drop, text.drop)
    more = made(10_000)
    both = Curves.mean([text, more, asked])
    assert int(both.tokens) == 40_000
    np.testing.assert_allclose(both.drop, (3 * text.drop + more.drop) / 4)
    # On the scale of the divergence, whatever the unit of the change is.
    assert asked.loss.sum() == pytest.approx(asked.divergence.sum())
    np.testing.assert_allclose(replace(asked, change=7 * asked.change).loss, asked.loss)
    plain = replace(text, drop=0 * text.drop).loss
    np.testing.assert_allclose(text.loss, np.maximum(plain + text.drop / 2, plain / 4))
    # Without gradients there is nothing but the change.
    without = replace(text, divergence=np.full((2, 3, 4), np.nan))
    np.testing.assert_array_equal(without.loss, without.change)


def test_a_model_without_gradients_is_searched_by_the_change_alone(
    tiny_model: Path, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    monkeypatch.setattr("search.curves.loss_gradients", lambda model, ids, wanted: None)
    curves = curves_of(loaded, prompt)
    assert np.isnan(curves.divergence).all() and int(curves.tokens) == 0
    np.testing.assert_array_equal(curves.loss, curves.change)


def test_nothing_of_the_layers_is_kept(tiny_model: Path, prompt: Prompt) -> None:
    from profiling.inside.residual import ResidualStream

    loaded = load_model(str(tiny_model), dtype="float32")
    with ResidualStream(loaded.model) as stream, torch.no_grad():
        loaded.model(torch.tensor([prompt.input_ids]))
        assert not stream._written
        assert float(stream.gain(2)) == 1


def test_numbers_that_a_dtype_cannot_hold_are_told(tiny_model: Path, prompt: Prompt) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    loaded.model.model.layers[1].self_attn.v_proj.weight.data[:, 0] = float("inf")
    with pytest.raises(HeadwiseError, match=r"layer 1 computes numbers that are not finite in float32: try another"):
        curves_of(loaded, prompt)


def test_several_prompts_are_averaged_and_the_worst_of_them_is_kept() -> None:
    def made(change: float) -> Curves:
        one = np.full((1, 1, 2), change)
        return Curves(change=one, error=one, recall=one, tiles=one)

    assert Curves.mean([made(1), made(3)]).change.tolist() == [[[2, 2]]]
    worst = Curves.worst([made(1), made(3)])
    assert worst.change.tolist() == [[[3, 3]]] and worst.error.tolist() == [[[2, 2]]]


@pytest.mark.parametrize("length", [128, 200])
def test_every_candidate_serves_the_shortest_prompts(tiny_model: Path, length: int) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    prompt = Prompt(tuple(i * 7 % 250 for i in range(length)), None)
    curves = score_prompt(loaded, prompt, ladder(length), layers=3, dense_tail=TAIL, backend="auto")
    assert np.isfinite(curves.change).all()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "GptOss"])
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_has_curves_and_logits(family: str) -> None:
    model = tiny_model(family, vocab_size=260).eval()
    loaded = LoadedModel(model=model, tokenizer=None, name=family, revision=None)
    prompt = Prompt(tuple(i * 7 % 200 + 3 for i in range(400)), None)
    modules = attention_layers(model)
    curves = curves_of(loaded, prompt, layers=max(modules) + 1)
    found = set(np.flatnonzero(curves.searched).tolist())
    assert found == set(modules) - sliding_layers(modules)
    for layer in found:
        assert (curves.change[layer, :, -1] < 1e-6).all() and (curves.change[layer, :, 4] > 1e-6).any()
    assert DenseLogits(model, [prompt]).drift().mean_kl < 1e-3
