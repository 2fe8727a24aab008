"""Padded batches give each sequence what it would get alone."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from artifacts import HeadwiseError

DENSE_BELOW = 305
LENGTHS = (400, 300, 90, 310)


def padded(prompts, side):
    width = max(len(p) for p in prompts)
    tokens, real = (
        torch.zeros(len(prompts), width, dtype=torch.long),
        torch.zeros(len(prompts), width).long(),
    )
    for row, prompt in enumerate(prompts):
        where = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        tokens[row, where], real[row, where] = prompt, 1
    return tokens, real


def positions(real):
    return (real.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_is_its_sequences_alone(side, family, build, apply, ids):
    model = build(family)
    prompts = [ids(n, seed=n)[0] for n in LENGTHS]
    tokens, real = padded(prompts, side)
    with apply(model, strict=True, dense_below=DENSE_BELOW) as handle:
        alone = [model(p[None]).logits[0] for p in prompts]
        before = handle.stats()["sparse"]
        together = model(tokens, attention_mask=real, position_ids=positions(real)).logits
        assert handle.stats()["sparse"] > before
    assert together.isfinite().all()
    for row, expected in enumerate(alone):
        torch.testing.assert_close(together[row, real[row].bool()], expected, atol=2e-4, rtol=1e-3)


def test_a_later_chunk_is_dense_for_the_sequence_that_is_still_short(build, apply, ids):
    model = build()
    prompts = [ids(n, seed=n)[0] for n in (400, 200)]
    tokens, real = padded(prompts, "left")

    def chunked(tokens, real):
        cache, logits = DynamicCache(config=model.config), []
        for chunk in (slice(0, 300), slice(300, 400)):
            given = {
                "attention_mask": real[:, : chunk.stop],
                "position_ids": positions(real)[:, chunk],
            }
            logits.append(
                model(tokens[:, chunk], past_key_values=cache, use_cache=True, **given).logits
            )
        return torch.cat(logits, dim=1)

    with apply(model, strict=True, dense_below=DENSE_BELOW) as handle:
        long, short = chunked(tokens[:1], real[:1])[0], model(prompts[1][None]).logits[0]
        assert handle.stats()["sparse"] == 2
        together = chunked(tokens, real)
        assert handle.stats()["sparse"] == 4
    torch.testing.assert_close(together[0], long, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(together[1, 200:], short, atol=2e-4, rtol=1e-3)


def test_equal_ranges_are_served_together_and_empty_sequences_are_finite(build, apply, ids):
    model, tokens = build(), ids(200, batch=3)
    real = torch.ones_like(tokens)
    real[:2, :50], real[2] = 0, 0
    with apply(model, strict=True):
        together = model(tokens, attention_mask=real, position_ids=positions(real)).logits
        alone = model(tokens[1:2, 50:]).logits
    assert together.isfinite().all()
    torch.testing.assert_close(together[1:2, 50:], alone, atol=2e-4, rtol=1e-3)


def test_padding_longer_than_the_threshold_makes_no_prompt_long(build, apply, ids):
    model, tokens = build(), ids(200, batch=2)
    real = torch.zeros_like(tokens)
    real[:, 100:] = 1
    expected = model(tokens, attention_mask=real).logits
    with apply(model) as handle:
        found = model(tokens, attention_mask=real).logits
        assert handle.stats() == {"sparse": 0, "dense": {"short": 2}}
    assert torch.equal(found, expected)


def test_generate_from_a_left_padded_batch(build, apply, ids):
    model = build()
    prompts = [ids(n, seed=n)[0] for n in (150, 200)]
    tokens, real = padded(prompts, "left")
    options = {"max_new_tokens": 5, "do_sample": False}
    with apply(model):
        together = model.generate(tokens, attention_mask=real, **options)[:, tokens.shape[1] :]
        for row, prompt in enumerate(prompts):
            alone = model.generate(
                prompt[None], attention_mask=torch.ones_like(prompt[None]), **options
            )
            assert together[row].tolist() == alone[0, len(prompt) :].tolist()


def test_a_sparse_prefill_makes_no_mask_and_a_dense_one_makes_it_once(
    build, apply, ids, monkeypatch
):
    made = []

    def counted(**given):
        made.append(given["q_length"])
        return sdpa_mask(**given)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", counted)
    model, tokens = build(), ids(200, batch=2)
    real = torch.ones_like(tokens)
    real[0, :50] = 0
    with apply(model, strict=True):
        model(tokens, attention_mask=real)
        assert made == []
    with apply(model), torch.enable_grad():
        model(tokens, attention_mask=real)
        assert made == [200]


def test_accelerate_hooks_pass_the_mask_on(build, apply, ids):
    hooks = pytest.importorskip("accelerate.hooks")
    model, tokens = build(), ids(200, batch=2)
    real = torch.ones_like(tokens)
    real[0, :50] = 0
    with apply(model, strict=True) as handle:
        expected = model(tokens, attention_mask=real).logits
        for layer in model.model.layers:
            hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu", io_same_device=True))
        assert torch.equal(model(tokens, attention_mask=real).logits, expected)
        assert handle.stats() == {"sparse": 4, "dense": {}}


def packing(prompts):
    """One row of prompts end to end, as DataCollatorWithFlattening gives it; and where each lies in
    it."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator([{"input_ids": prompt.tolist()} for prompt in prompts])
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0).tolist()
    del batch["labels"]
    return batch, [slice(end - len(p), end) for p, end in zip(prompts, ends, strict=True)]


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3"])
def test_packed_sequences_are_each_alone_densely_and_that_is_said_once(
    family, build, apply, ids, warnings
):
    model = build(family)
    prompts = [ids(n, seed=n)[0] for n in (310, 90, 400, 305, 7)]
    batch, places = packing(prompts)
    expected = [model(prompt[None]).logits[0] for prompt in prompts]
    with apply(model, dense_below=DENSE_BELOW) as handle:
        for _ in range(2):
            together = model(**batch, use_cache=False).logits[0]
        assert handle.stats()["sparse"] == 0
    for logits, place in zip(expected, places, strict=True):
        torch.testing.assert_close(together[place], logits, atol=2e-4, rtol=1e-3)
    assert (
        len(warnings()) == 1
        and "the mask is not causal over contiguous tokens (packed, " in warnings()[0]
    )
    with (
        apply(model, strict=True, dense_below=DENSE_BELOW),
        pytest.raises(HeadwiseError, match="not causal"),
    ):
        model(**batch, use_cache=False)


def test_several_rows_of_packed_sequences(build, apply, ids):
    model = build()
    prompts = [ids(n, seed=n)[0] for n in (310, 90, 60, 340)]
    tokens = torch.stack([torch.cat(prompts[:2]), torch.cat(prompts[2:])])
    at = torch.stack(
        [torch.cat([torch.arange(len(p)) for p in prompts[i : i + 2]]) for i in (0, 2)]
    )
    alone = [model(prompt[None]).logits[0] for prompt in prompts]
    with apply(model, dense_below=DENSE_BELOW):
        together = model(tokens, position_ids=at, use_cache=False).logits
    torch.testing.assert_close(together.flatten(0, 1), torch.cat(alone), atol=2e-4, rtol=1e-3)


def test_packing_that_only_flash_attention_reads_is_refused(build, apply, ids, warnings):
    model, prompts = build(), [ids(n, seed=n)[0] for n in (150, 200)]
    batch, _ = packing(prompts)
    expected = model(**batch).logits
    with apply(model) as handle:
        assert torch.equal(model(**batch).logits, expected)
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and "cu_seq_lens alone" in warnings()[0]
    with apply(model, strict=True), pytest.raises(HeadwiseError, match="cu_seq_lens alone"):
        model(**batch)
