"""A PrefillMask equals the mask of sdpa or eager, and costs nothing until it is read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    find_packed_sequence_indices,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from runtime.attention.applied import forget, remember
from runtime.attention.layer import Settings
from runtime.attention.mask import PrefillMask, headwise_mask, starts_of
from tests.runtime.tiny import DENSE_BELOW


@pytest.fixture(params=["sdpa", "eager"])
def call(request):
    """Return call(**arguments), which returns the masks of headwise_mask and of the function it
    replaces.

    The default is 128 queries of one sequence.
    """
    config = LlamaConfig()
    settings = Settings(dense_below=DENSE_BELOW, model_attention=request.param)
    remember(config, {}, settings)
    other = {"sdpa": sdpa_mask, "eager": eager_mask}[request.param]

    def call(**arguments):
        sizes = {"batch_size": 1, "q_length": 128, "kv_length": 128}
        arguments = {"dtype": torch.float32, "config": config} | sizes | arguments
        return headwise_mask(**arguments), other(**arguments)

    yield call
    forget(settings, [])


WINDOW = sliding_window_causal_mask_function(16)


def padding(ranges, length):
    at = torch.arange(length)
    return torch.stack([(at >= start) & (at < end) for start, end in ranges])


@pytest.mark.parametrize(("q_offset", "slots"), [(0, 40), (torch.tensor(72), 0)], ids=str)
def test_prefill_mask_read_as_tensor_equals_full_mask(q_offset, slots, call):
    length = int(q_offset) + 128
    real = padding([(0, length), (30, length), (0, 50), (0, 0)], length)
    mask, expected = call(
        batch_size=4, kv_length=length + slots, q_offset=q_offset, attention_mask=real
    )
    assert isinstance(mask, PrefillMask)
    assert (mask.shape, mask.dtype) == (expected.shape, expected.dtype)
    assert mask.contiguous() is mask and mask.to("cpu") is mask
    moved = mask.to("meta")
    assert isinstance(moved, PrefillMask) and moved.device.type == "meta"
    assert moved.context == mask.context and not mask._made
    assert mask.context.ranges == ((0, length), (30, length), (0, 50), (0, 0))
    assert torch.equal(mask.for_dense(), expected)
    assert torch.equal(mask[:, :, 3:, :77], expected[:, :, 3:, :77])
    assert torch.equal(torch.cat([mask, mask], -1), torch.cat([expected, expected], -1))
    assert type(mask.to(torch.float16)) is torch.Tensor


def test_starts_of_padded_mask_needs_sequences_to_reach_last_key(call):
    def starts(*ranges):
        mask, _ = call(batch_size=2, attention_mask=padding(ranges, 128))
        is_known, firsts = starts_of(mask)
        return is_known, firsts if firsts is None else firsts.tolist()

    assert starts_of(None) == (True, None)
    assert starts((0, 128), (0, 128)) == (True, None)
    assert starts((0, 128), (30, 128)) == (True, [0, 30])
    assert starts((0, 128), (0, 100)) == (False, None)
    assert starts((5, 128), (30, 100)) == (False, None)
    assert starts_of(torch.ones(2, 1, 128, 128)) == (False, None)


@pytest.mark.parametrize("gone", [0, 50])
def test_prefill_mask_of_sliding_layer_equals_full_mask(gone, call):
    """`gone` tokens have left the cache; positions count from the remaining tokens."""
    real = padding([(0, gone + 128), (30, gone + 128), (0, 100)], gone + 128)
    # A hole among tokens that left the cache does not count.
    real[0, :gone][9:10] = False
    rule = {"mask_function": WINDOW, "local_size": 16, "attention_mask": real}
    mask, expected = call(batch_size=3, q_length=113, q_offset=gone + 15, kv_offset=gone, **rule)
    assert isinstance(mask, PrefillMask) and mask.shape == expected.shape
    assert mask.context.window == 16
    assert mask.context.ranges == ((0, 128), (max(30 - gone, 0), 128), (0, 100 - gone))
    assert torch.equal(mask.for_dense(), expected)


def test_prefill_mask_without_padding_keeps_dense_mask(call):
    mask, expected = call(batch_size=2)
    actual = mask.for_dense()
    assert (actual is None and expected is None) or torch.equal(actual, expected)
    assert mask.read().shape == (2, 1, 128, 128)
    # Another dtype needs a full mask.
    assert type(call()[0].to(torch.float16)) is torch.Tensor
    # The caller requires a mask.
    mask, expected = call(allow_is_causal_skip=False)
    assert isinstance(mask, PrefillMask) and torch.equal(mask.for_dense(), expected)


NUMBERS = find_packed_sequence_indices(torch.cat([torch.arange(58), torch.arange(70)])[None])
PACKED = packed_sequence_mask_function(NUMBERS)
BEHIND = (torch.arange(128)[None] >= 90).long() - 1
IMAGE = blockwise_overlay(BEHIND)
IMAGES = or_masks(causal_mask_function, IMAGE)
CHUNKED = chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64))
OTHERS = {
    "two windows": {"mask_function": WINDOW, "local_size": 20},
    "chunked": {"mask_function": CHUNKED, "local_size": 16},
    "evicted": {"attention_mask": padding([(0, 128)], 128), "kv_offset": 1},
    "packed": {"mask_function": and_masks(causal_mask_function, PACKED)},
    "packed both ways": {"mask_function": PACKED},
    "union": {"mask_function": or_masks(causal_mask_function, PACKED)},
    "image": {"mask_function": IMAGES},
    "image in a window": {"mask_function": and_masks(IMAGES, sliding_window_overlay(30))},
    "image behind a window": {"mask_function": or_masks(WINDOW, IMAGE), "local_size": 16},
}


@pytest.mark.parametrize("name", OTHERS)
def test_headwise_mask_keeps_other_masks(name, call):
    mask, expected = call(**OTHERS[name], allow_is_causal_skip=False)
    assert not isinstance(mask, PrefillMask) and torch.equal(mask, expected)


@pytest.mark.parametrize("name", ["chunked", "static"])
def test_headwise_mask_of_first_keys_is_not_skipped(name, call):
    """Without a mask, sdpa aligns queries to the first keys, and attention to the last."""
    chunked = {"mask_function": CHUNKED, "local_size": 16} if name == "chunked" else {}
    mask, expected = call(q_length=8, kv_length=12, **chunked)
    true = causal_mask_function(0, 0, torch.arange(8)[:, None], torch.arange(12))
    if mask.is_floating_point():
        mask = mask == 0
    else:
        assert expected is None
    assert torch.equal(mask[0, 0].bool(), true)


CUTS = {
    "whole": {},
    "padded": {"batch_size": 3, "attention_mask": padding([(0, 128), (30, 128), (0, 100)], 128)},
    "behind a past": {"q_length": 40, "q_offset": 88},
    "few queries": {"q_length": 5, "q_offset": 123},
    "static": {"kv_length": 200, "q_offset": torch.tensor(0)},
    "static, padded": {
        "batch_size": 2,
        "kv_length": 200,
        "attention_mask": padding([(0, 128), (60, 128)], 128),
    },
    "window": {"mask_function": WINDOW, "local_size": 16},
    "window with tokens gone": {
        "mask_function": WINDOW,
        "local_size": 16,
        "q_length": 60,
        "kv_length": 75,
        "q_offset": 65,
        "kv_offset": 50,
    },
}
SLICES = [slice(-1, None), slice(-3, None), slice(2, 4), slice(0, 2), slice(1, None)]


@pytest.mark.parametrize("queries", [slice(None), *SLICES], ids=str)
@pytest.mark.parametrize("name", CUTS)
def test_prefill_mask_sliced_by_queries_stays_prefill_mask(name, queries, call):
    mask, _ = call(**CUTS[name])
    true = mask.read()
    mask._made.clear()
    cut = mask[:, :, queries]
    assert isinstance(cut, PrefillMask) and not mask._made
    for_dense = cut.for_dense()
    if for_dense is None:
        # sdpa's default: no mask, or causal from the first key.
        q_len, k_len = cut.shape[2:]
        seen = torch.ones(q_len, k_len, dtype=torch.bool)
        for_dense = (seen.tril() if q_len > 1 else seen).expand(cut.shape)
    for read in (for_dense, cut.read()):
        assert torch.equal(read, true[:, :, queries])
    # The context's real queries match the mask, too.
    rows = torch.zeros(cut.shape, dtype=torch.bool)
    for row, q_start, q_len, k_start, k_len, _ in cut.context.sequences:
        seen = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
        if cut.context.window is not None:
            seen = seen.triu(k_len - q_len - cut.context.window + 1)
        rows[row, 0, q_start : q_start + q_len, k_start : k_start + k_len] = seen
    real = rows.any(-1)
    expected = true[:, :, queries]
    if true.is_floating_point():
        expected = expected == 0
    assert real.any() and torch.equal(rows[real], expected[real])
    is_known, starts = starts_of(cut)
    if is_known:
        firsts = torch.zeros(len(cut)) if starts is None else starts
        last = torch.arange(cut.shape[3]) >= firsts[:, None]
        assert torch.equal(expected[:, 0, -1], last)


@pytest.mark.parametrize("name", CUTS)
def test_prefill_mask_full_slice_returns_same_mask(name, call):
    mask, _ = call(**CUTS[name])
    for whole in (mask[:, :, -0:], mask[..., : mask.shape[3]], mask[:, :, -999:], mask.detach()):
        assert isinstance(whole, PrefillMask) and whole.context is mask.context
    assert not mask._made
    true = mask.read()
    for other in (mask[:, :, ::2], mask[:, :, :0], mask[..., 1:]):
        assert type(other) is torch.Tensor
    assert torch.equal(mask[:, :, ::2], true[:, :, ::2])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=130, max_size=130), min_size=1, max_size=3), st.data()
)
def test_ranges_exist_only_without_holes(rows, data):
    config = LlamaConfig()
    remember(config, {}, Settings(dense_below=DENSE_BELOW))
    real = torch.tensor(rows)
    for row in range(len(rows)):
        if data.draw(st.booleans()):
            start, end = sorted((data.draw(st.integers(0, 130)), data.draw(st.integers(0, 130))))
            real[row] = padding([(start, end)], 130)[0]
    mask = headwise_mask(len(rows), 130, 130, attention_mask=real, config=config)
    whole = all("01" not in "".join("01"[v] for v in row).lstrip("0") for row in real.tolist())
    assert isinstance(mask, PrefillMask) == whole
    if whole:
        for row, (start, end) in zip(real, mask.context.ranges, strict=True):
            assert row.nonzero().flatten().tolist() == list(range(start, end))
