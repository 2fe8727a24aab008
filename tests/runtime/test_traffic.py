"""What clients of a server do with a model: each gives the tokens of plain transformers masked by
the same index."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer

from tests.runtime.omnikv import CLOSE

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


class Quantized(QuantizedLayer):
    """Eight bits a number, by the largest of each row: what a quantised cache of transformers
    is."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        largest = tensor.abs().amax(-1, keepdim=True) / 127
        return (tensor / largest).round().to(torch.int8), largest

    def _dequantize(self, quantized: tuple[Tensor, Tensor]) -> Tensor:
        return quantized[0] * quantized[1]


def quantised(model: Any) -> dict[str, Any]:
    return {"past_key_values": Cache(layers=[Quantized(residual_length=16) for _ in range(2)])}


def sampled(model: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    return {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7}


def fixed(**options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: options


STATIC = {"cache_implementation": "static"}
TWO_BEAMS = {"num_beams": 2, "num_return_sequences": 2}
# Options under the artifact, and those of plain transformers that have to give the same tokens.
GENERATE = {
    "plain": (fixed(), fixed()),
    "no cache": (fixed(use_cache=False), fixed(use_cache=False)),
    "static": (fixed(**STATIC), fixed()),
    "hybrid": (fixed(cache_implementation="hybrid"), fixed()),
    "chunks": (fixed(prefill_chunk_size=100), fixed(prefill_chunk_size=100)),
    "beams": (fixed(num_beams=3), fixed(num_beams=3)),
    "static beams": (fixed(**TWO_BEAMS, **STATIC), fixed(**TWO_BEAMS)),
    "samples": (sampled, sampled),
    "quantised": (quantised, quantised),
    "assisted by looking up": (fixed(prompt_lookup_num_tokens=4), fixed()),
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("Llama", name) for name in GENERATE),
        *(
            ("Gemma3", name)
            for name in ("static", "chunks", "static beams", "assisted by looking up")
        ),
    ],
)
def test_generate(family: str, name: str, build: Any, apply: Any, masked: Any, ids: Any) -> None:
    model, prompt = build(family), ids(200)
    # What was said before may come again, so that something is looked up and something is rejected.
    prompt = torch.cat([prompt, prompt[:, :40]], 1)
    mine, theirs = GENERATE[name]
    with masked(model):
        expected = model.generate(prompt, **OPTIONS | theirs(model))
    with apply(model, strict=True) as handle:
        found = model.generate(prompt, **OPTIONS | mine(model))
        assert handle.stats()["sparse"] > 0
    assert found.tolist() == expected.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_caches_of_transformers_that_offload(kind, build, apply, masked, ids) -> None:
    model, prompt = build().to("cuda"), ids(200).to("cuda")
    with masked(model):
        expected = model.generate(prompt, **OPTIONS)
    with apply(model, strict=True) as handle:
        found = model.generate(prompt, cache_implementation=kind, **OPTIONS)
        assert handle.stats()["sparse"] == 2
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 90}], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_assisted_decoding(family, chunks, build, apply, masked, ids) -> None:
    model, assistant, prompt = build(family), build(family, seed=1), ids(200)
    given = {"assistant_model": assistant} | chunks
    with masked(model):
        expected = model.generate(prompt, **OPTIONS)
        try:
            assert model.generate(prompt, **OPTIONS, **given).tolist() == expected.tolist()
        except RuntimeError as error:
            # Older ones lose count in the caches of layers that slide.
            pytest.skip(f"this transformers fails without an artifact: {error}")
    # The assistant has an artifact of its own.
    with apply(model, strict=True) as main, apply(assistant, strict=True) as helper:
        assert model.generate(prompt, **OPTIONS, **given).tolist() == expected.tolist()
        assert main.stats()["sparse"] > 0 and helper.stats()["sparse"] > 0


@pytest.mark.parametrize("own", [False, True], ids=["DynamicCache", "new_cache"])
def test_a_prefix_is_prefilled_once_and_continued_often(own, build, apply, masked, ids) -> None:
    model, prefix, suffixes = build(), ids(200), [ids(n, seed=n) for n in (80, 1, 150)]

    def continued(cache: Any, suffix: Tensor) -> Tensor:
        return model(suffix, past_key_values=cache, use_cache=True).logits

    with masked(model):
        cache = DynamicCache(config=model.config)
        model(prefix, past_key_values=cache)
        expected = [continued(copy.deepcopy(cache), suffix) for suffix in suffixes]
    with apply(model, strict=True) as handle:
        cache = handle.new_cache() if own else DynamicCache(config=model.config)
        model(prefix, past_key_values=cache)
        copies = [continued(copy.deepcopy(cache), suffix) for suffix in suffixes]
        for suffix, theirs, mine in zip(suffixes, expected, copies, strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)
            cropped = continued(cache, suffix)
            cache.crop(-suffix.shape[1])
            assert cache.get_seq_length() == 200
            assert torch.equal(cropped, mine)
        assert handle.stats()["sparse"] == 2 + 2 * 4


@pytest.mark.parametrize("own", [False, True], ids=["DynamicCache", "new_cache"])
def test_beams_of_a_padded_batch(own, build, apply, ids) -> None:
    model, prompts = build(), [ids(n, seed=n) for n in (200, 150)]
    tokens = torch.cat([prompts[0], torch.nn.functional.pad(prompts[1], (50, 0))])
    real = (tokens > 0).long()
    options = OPTIONS | {"num_beams": 3, "num_return_sequences": 2}
    with apply(model, strict=True) as handle:
        alone = [model.generate(p, **options)[:, p.shape[1] :] for p in prompts]
        cache = {"past_key_values": handle.new_cache()} if own else {}
        together = model.generate(tokens, attention_mask=real, **cache, **options)[:, 200:]
    assert together.tolist() == torch.cat(alone).tolist()


def test_inference_mode_and_embeddings_in_place_of_tokens(build, apply, masked, ids) -> None:
    model, prompt = build(), ids(200)
    with masked(model):
        expected = model.generate(prompt, **OPTIONS)[:, 200:]
    with torch.enable_grad(), apply(model, strict=True):
        embeddings = model.get_input_embeddings()(prompt)
        with torch.inference_mode():
            found = model.generate(inputs_embeds=embeddings, **OPTIONS)
    assert found.tolist() == expected.tolist()


def test_hooks_of_the_user_and_hidden_states_are_what_they_were(build, apply, masked, ids) -> None:
    model, prompt = build(), ids(200)
    attention = model.model.layers[0].self_attn
    seen: list[Tensor] = []

    def halve(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append(output[0].clone())
        return (output[0] / 2, *output[1:])

    def doubled(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] * 2}

    attention.register_forward_hook(halve, with_kwargs=True)
    attention.register_forward_pre_hook(doubled, with_kwargs=True)
    with masked(model):
        expected = model(prompt, output_hidden_states=True).hidden_states
    with apply(model, strict=True) as handle:
        found = model(prompt, output_hidden_states=True).hidden_states
        assert handle.stats() == {"sparse": 2, "dense": {}}
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(seen[1], seen[0], **CLOSE)


@pytest.mark.parametrize(("section", "offload"), [("prefill", "never"), ("decode", "packed")])
def test_sequences_that_end_leave_the_batch(offload, section, build, apply, decoding, ids) -> None:
    model, steps = build(num_hidden_layers=6), [(0, 1, 2, 3), (1, 3), (1,)]
    prompts = [ids(n, seed=n) for n in (200, 170, 150, 90)]
    tokens = torch.cat([torch.nn.functional.pad(p, (200 - p.shape[1], 0)) for p in prompts])
    applied = decoding(model).apply(model) if section == "decode" else apply(model, strict=True)
    with applied as handle:
        options = OPTIONS | {"max_new_tokens": 2 * len(steps)}
        expected = []
        for prompt in prompts:
            cache = handle.new_cache(offload=offload)
            out = model.generate(prompt, past_key_values=cache, **options)
            expected.append(out[0, prompt.shape[1] :].tolist())
        cache = handle.new_cache(offload=offload)
        real = (tokens > 0).long()
        made: dict[int, list[int]] = {row: [] for row in steps[0]}
        new, at, rows = tokens, (real.cumsum(1) - 1).clamp(min=0), steps[0]
        for step in range(2 * len(steps)):
            stay = steps[step // 2]
            if stay != rows:
                places = torch.tensor([rows.index(row) for row in stay])
                cache.batch_select_indices(places)
                new, real, at, rows = new[places], real[places], at[places], stay
            out = model(new, attention_mask=real, position_ids=at, past_key_values=cache)
            new = out.logits[:, -1].argmax(-1, keepdim=True)
            for row, token in zip(rows, new.flatten().tolist(), strict=True):
                made[row].append(token)
            real, at = torch.cat([real, torch.ones_like(new)], 1), at[:, -1:] + 1
    for row, tokens in made.items():
        assert tokens == expected[row][: len(tokens)]
    assert [len(made[row]) for row in steps[0]] == [2, 6, 2, 4]
