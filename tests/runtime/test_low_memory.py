"""`apply(model, low_memory=True)`: the same logits, whatever is asked, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

from profiling.memory_plan import plan, shape_of
from runtime import Headwise
from runtime.attention import masks
from runtime.low_memory import tiles
from tests.runtime.live_bytes import LiveBytes
from tests.runtime.omnikv import LAYERS
from tests.runtime.tiny import FAMILIES

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TILE, BACKEND = 48, "auto"
TILED = ("Llama", "Qwen3", "Gemma2", "Gemma3", "Phi3", "GPTNeoX", "Olmo2", "Phi", "Mixtral", "GptOss", "Qwen3Moe")


@pytest.fixture(autouse=True)
def _small(monkeypatch) -> None:
    """Tiles and masks count from sizes on that these models reach."""
    monkeypatch.setattr(tiles, "TOKENS", {"cpu": TILE})
    monkeypatch.setattr(masks, "LARGE", 4096)


@pytest.fixture
def both(artifact_for):
    """both(model, run, **artifact) -> what run(handle) gives without low_memory, and with it."""

    def both(model, run, *, headwise=None, **changes):
        headwise = headwise or Headwise(artifact_for(model, **changes))
        found = []
        for low_memory in (False, True):
            with headwise.apply(model, backend=BACKEND, low_memory=low_memory) as handle:
                found.append(run(handle))
        return found

    return both


def close(expected: torch.Tensor, found: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * max(1.0, float(expected.abs().max())), rtol=0)


def same(expected: torch.Tensor, found: torch.Tensor) -> None:
    close(expected, found)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def padding(lengths: tuple[int, ...], side: str) -> dict[str, torch.Tensor]:
    places = torch.arange(max(lengths))
    rows = [places < n if side == "right" else places >= len(places) - n for n in lengths]
    real = torch.stack(rows).long()
    return {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}


def widths(model: nn.Module, seen: list[int]) -> list:
    """Hooks that note how many tokens each projection inside a block gets."""

    def note(module, args, output) -> None:
        seen.append(args[0].shape[:-1].numel())

    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    return [module.register_forward_hook(note) for module in blocks.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("dense_below", [128, 1024])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits(family, dense_below, build, both, ids):
    model, prompt = build(family), ids(200, batch=2)
    (expected, calls), (found, others) = both(
        model, lambda handle: (model(prompt).logits, handle.stats()), dense_below=dense_below
    )
    same(expected, found)
    assert calls == others


@pytest.mark.parametrize("family", TILED)
def test_no_projection_sees_more_than_a_tile(family, build, both, ids, warnings):
    model, seen = build(family), []
    hooks = widths(model, seen)
    both(model, lambda handle: (seen.clear(), model(ids(200, batch=2))))
    assert seen and max(seen) <= TILE and not warnings()
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(side, family, build, both, ids):
    model, mask = build(family), padding((200, 90, 150), side)
    real, prompt = mask["attention_mask"].bool(), ids(200, batch=3)
    expected, found = both(model, lambda handle: model(prompt, **mask).logits[real])
    same(expected, found)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPTNeoX"])
@pytest.mark.parametrize("own", [True, False])
def test_chunks_and_decode(own, family, build, both, ids):
    model, text = build(family), ids(330)

    def run(handle):
        cache = handle.new_cache() if own else DynamicCache(config=model.config)
        parts = [(0, 160), (160, 320), *((at, at + 1) for at in range(320, 330))]
        return torch.cat([model(text[:, a:b], past_key_values=cache).logits for a, b in parts], dim=1)

    same(*both(model, run))


@pytest.mark.parametrize("cache", ["own", "offloaded", "chunked"])
def test_generated_tokens(cache, build, both, ids):
    model, prompt = build(), ids(200, batch=2)

    def run(handle):
        made = handle.new_cache() if cache == "own" else DynamicCache(config=model.config)
        more = {"prefill_chunk_size": 100} if cache == "chunked" else {}
        return model.generate(prompt, past_key_values=made, max_new_tokens=6, do_sample=False, **more)

    expected, found = both(model, run)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("offload", ["never", "packed", "brutal"])
def test_with_chosen_tokens_and_offload(offload, build, both, decoding, ids):
    model, text = build(**LAYERS), ids(208)

    def run(handle):
        cache = handle.new_cache(offload=offload)
        parts = [(0, 120), (120, 200), *((at, at + 1) for at in range(200, 208))]
        return torch.cat([model(text[:, a:b], past_key_values=cache).logits for a, b in parts], dim=1)

    same(*both(model, run, headwise=decoding(model)))


def test_with_what_is_watched(build, artifact_for, ids):
    model, headwise = build(), Headwise(artifact_for(build()))
    found = []
    for low_memory in (False, True):
        with headwise.apply(model, backend=BACKEND, watch=True, low_memory=low_memory) as handle:
            model(ids(200))
            found.append(handle.stats())
    plain, low = found
    assert plain["sparse"] == low["sparse"] == 2 and plain.keys() == low.keys()


@pytest.mark.parametrize("family", TILED)
def test_undo_leaves_nothing(family, build, both, ids):
    model, prompt = build(family), ids(200)
    before = model(prompt).logits
    both(model, lambda handle: model(prompt))
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert not [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]
    assert torch.equal(model(prompt).logits, before)


def test_functions_that_others_put_on_modules_stay(build, artifact_for, ids):
    model, prompt, calls = build(), ids(200), []
    inner, outer = model.model.layers[0].mlp, model.model.layers[1].mlp
    expected = model(prompt).logits

    def wrapped(module):
        former = module.forward

        def forward(x):
            calls.append(x.shape[1])
            return former(x)

        module.forward = forward
        return forward

    mine = wrapped(inner)
    with Headwise(artifact_for(model, dense=True)).apply(model, backend=BACKEND, low_memory=True):
        yours = wrapped(outer)
        same(expected, model(prompt).logits)
        assert max(calls) == 200 and calls.count(TILE) == 4
    assert inner.forward is mine and outer.forward is yours
    calls.clear()
    assert torch.equal(model(prompt).logits, expected) and calls == [200, 200]


def test_hooks_of_the_user_see_whole_tensors(build, both, ids):
    model, prompt, seen = build(), ids(200), {}
    block = model.model.layers[1]
    places = {"attention": block.self_attn, "mlp": block.mlp, "norm": block.input_layernorm, "block": block}
    for name, module in places.items():
        module.register_forward_hook(
            lambda module, args, output, name=name: seen.__setitem__(
                name, output[0] if isinstance(output, tuple) else output
            )
        )
    inputs = []
    block.self_attn.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))

    def run(handle):
        seen.clear()
        inputs.clear()
        model(prompt)
        return dict(seen), torch.cat([x for x in inputs if x.shape[1] != 16][-5 if len(inputs) > 1 else 0 :], dim=1)

    (expected, attended), (found, tiled) = both(model, run)
    assert {name: x.shape for name, x in found.items()} == dict.fromkeys(places, (1, 200, 128))
    for name in places:
        close(expected[name], found[name])
    close(attended, tiled)


def test_hidden_states_and_weights_are_given_as_ever(build, both, ids):
    model, prompt = build(), ids(200)
    for asked in ("output_hidden_states", "output_attentions"):
        expected, found = both(model, lambda handle, asked=asked: model(prompt, **{asked: True}))
        name = asked.removeprefix("output_")
        assert len(expected[name]) == len(found[name]) > 1
        for one, other in zip(expected[name], found[name], strict=True):
            torch.testing.assert_close(other, one, **CLOSE)


def test_a_router_is_recorded_once_a_call(build, both, ids):
    model, prompt = build("Mixtral"), ids(200, batch=2)
    expected, found = both(model, lambda handle: model(prompt, output_router_logits=True).router_logits)
    assert [x.shape for x in found] == [x.shape for x in expected]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, **CLOSE)


class Shifted(nn.Module):
    """An MLP that mixes in the token before, as some recurrent models do."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x + nn.functional.pad(x, (0, 0, 1, -1)))


class Counting(LlamaAttention):
    """An attention that asks its cache how long it is."""

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        scale = 1.0 + 0.001 * (past_key_values.get_seq_length() if past_key_values is not None else 0)
        return super().forward(hidden_states * scale, past_key_values=past_key_values, **kwargs)


def test_modules_that_mix_tokens_are_left_alone(build, both, ids, warnings):
    model = build()
    model.model.layers[0].mlp = Shifted(model.model.layers[0].mlp)
    model.model.layers[1].self_attn.__class__ = Counting

    def run(handle):
        cache = handle.new_cache()
        return torch.cat([model(ids(200)[:, at : at + 100], past_key_values=cache).logits for at in (0, 100)], dim=1)

    same(*both(model, run))
    assert sorted(said.split()[0] for said in warnings()) == ["Counting", "Shifted"]


def test_gradients_are_those_of_the_whole(build, both, ids):
    model, prompt = build(), ids(100)

    def run(handle):
        model.zero_grad()
        with torch.enable_grad():
            model(prompt).logits.square().mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected, found = both(model, run)
    assert torch.equal(expected, found)


def test_copies_have_the_plain_forward(build, artifact_for, ids):
    model, prompt = build(), ids(200)
    expected = model(prompt).logits
    with Headwise(artifact_for(model)).apply(model, backend=BACKEND, low_memory=True):
        pickled = pickle.dumps(model)
        copies = [copy.deepcopy(model), pickle.loads(pickled)]
    assert b"runtime" not in pickled
    for each in copies:
        assert not any(isinstance(vars(module).get("forward"), tiles.Tiled) for module in each.modules())
        each.set_attn_implementation("sdpa")
        assert torch.equal(each(prompt).logits, expected)
        owners = {id(module.forward.__self__) for module in each.modules()}
        assert owners == {id(module) for module in each.modules()}


def test_threads_have_tiles_of_their_own(build, artifact_for, ids):
    model, found = build(), {}
    prompts = [ids(200, seed=seed) for seed in range(3)]
    with Headwise(artifact_for(model)).apply(model, backend=BACKEND, low_memory=True):
        expected = [model(prompt).logits for prompt in prompts]

        def run(at):
            with torch.no_grad():
                found[at] = [model(prompts[at]).logits for _ in range(3)]

        threads = [threading.Thread(target=run, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for at, want in enumerate(expected):
        for logits in found[at]:
            torch.testing.assert_close(logits, want, **CLOSE)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3"])
@pytest.mark.parametrize("padded", [False, True])
def test_nothing_of_query_by_key_size_is_made(padded, family, build, artifact_for, ids):
    length = 1600
    model = build(family, max_position_embeddings=2048)
    more = padding((length, length // 2), "left") if padded else {}
    with (
        Headwise(artifact_for(model)).apply(model, backend=BACKEND, low_memory=True) as handle,
        LiveBytes() as bytes_of,
    ):
        model(ids(length, batch=1 + padded), past_key_values=handle.new_cache(), logits_to_keep=1, **more)
    # As little as a mask of booleans takes.
    assert bytes_of.largest < (1 + padded) * length * length


def test_memory_beside_the_cache_is_what_the_plan_says(build, artifact_for, ids):
    """And without low_memory the MLP alone takes three times its width."""
    length, peaks, plans = 2000, [], []
    model = build(intermediate_size=1024, max_position_embeddings=4096, num_hidden_layers=3)
    headwise, shape = Headwise(artifact_for(model, rows=[["a_64_64"] * 4] * 3)), shape_of(model.config, "float32")
    for low_memory in (False, True):
        with headwise.apply(model, backend=BACKEND, low_memory=low_memory) as handle:
            cache = handle.new_cache()
            with LiveBytes() as bytes_of:
                model(ids(length), past_key_values=cache, logits_to_keep=1)
            peaks.append(bytes_of.peak - handle.cache_bytes(cache).device)
        plans.append(plan(shape, length, low_memory=low_memory, device="cpu").passing)
    # A native kernel's packing of one KV head is planned for, and no tensor.
    assert 0.98 < peaks[0] / plans[0] < 1.02 and 0.8 < peaks[1] / plans[1] < 1.02
    assert peaks[1] < peaks[0] / 3


def test_a_call_holds_on_to_nothing(build, artifact_for, ids):
    model = build()
    gc.collect()
    gc.disable()
    try:
        with Headwise(artifact_for(model)).apply(model, backend=BACKEND, low_memory=True):
            # What patterns lay out for a length is kept on purpose (kernels.kept).
            model(ids(300))
            with LiveBytes() as bytes_of:
                result = model(ids(300), use_cache=False, logits_to_keep=1).logits
                assert bytes_of.now == result.untyped_storage().nbytes()
    finally:
        gc.enable()


def test_logits_of_every_token_are_given_and_said_to_be_large(build, both, ids, warnings, monkeypatch):
    monkeypatch.setattr(tiles, "LOGITS", 50_000)
    model, prompt = build(), ids(200)
    expected, found = both(model, lambda handle: (model(prompt[:, :100]), model(prompt), model(prompt))[-1].logits)
    same(expected, found)
    assert (
        len(warnings()) == 1 and "logits of 200 tokens were asked for, 0.0 GiB: pass logits_to_keep=1" in warnings()[0]
    )
