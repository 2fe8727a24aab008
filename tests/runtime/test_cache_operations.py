"""Operations on caches: each way to serve a model continues as if the tokens had come alone."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from runtime import LoadedArtifact
from tests.runtime.batches import chunks_of, fed, real_from
from tests.runtime.omnikv import CLOSE, LAYERS

# Decode section, and where its keys and values are; no section for patterns.
WAYS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "patterns": (None, "never"),
    "patterns, DynamicCache": (None, "never"),
    "last": ({}, "never"),
    "last, packed": ({}, "packed"),
    "uniform, one filter, packed": (
        {"selector": "uniform", "window": 3, "filter_layers": (2,)},
        "packed",
    ),
    "exponential, packed": ({"selector": "exponential"}, "packed"),
    "prefill": ({"prefill_ratio": 0.5}, "never"),
    "prefill, packed": ({"prefill_ratio": 0.5}, "packed"),
}
every_way = pytest.mark.parametrize("way", WAYS)
pytestmark = pytest.mark.usefixtures("late")


@pytest.fixture
def serving(build, artifact_for, decoding):
    """Return serving(way): a model, the artifact's handle, and a function that makes a cache."""
    handles = []

    def serving(way):
        section, offload = WAYS[way]
        model = build(**({} if section is None else LAYERS))
        loaded = LoadedArtifact(artifact_for(model))
        if section is not None:
            loaded = decoding(model, **section)
        handle = loaded.apply(model, strict=True)
        handles.append(handle)

        def new_cache():
            if "DynamicCache" in way:
                return DynamicCache(config=model.config)
            return handle.new_cache(offload=offload)

        return model, handle, new_cache

    yield serving
    for handle in handles:
        handle.undo()


@every_way
def test_padded_batch_continues_after_sequences_end_like_each_alone(way, serving, ids):
    model, handle, new_cache = serving(way)
    # One sequence is below the budget at first, and one begins in the last chunk.
    padding, sizes = (0, 30, 143, 85), (110, 74, 1, 3)
    n = sum(sizes)
    tokens, real = ids(n + 3, batch=4), real_from(n + 3, *padding)
    alone = []
    for row, begin in enumerate(padding):
        own = [end - max(begin, start) for start, end in chunks_of(n, sizes) if end > begin]
        alone.append(fed(model, tokens[row : row + 1, begin:], (*own, 1), new_cache())[0])
    cache, rows = new_cache(), [0, 1, 2, 3]
    together = fed(model, tokens[:, :n], sizes, cache, attention_mask=real[:, :n])
    for row, begin in enumerate(padding):
        torch.testing.assert_close(together[row, begin:], alone[row][:-3], **CLOSE)
    for step, stay in enumerate(([0, 1, 2, 3], [3, 1], [1])):
        cache.batch_select_indices(torch.tensor([rows.index(row) for row in stay]))
        rows, end = stay, n + 1 + step
        more, mask = tokens[rows, end - 1 : end], real[rows, :end]
        actual = fed(model, more, (1,), cache, attention_mask=mask)
        expected = torch.stack([alone[row][None, step - 3] for row in rows])
        torch.testing.assert_close(actual, expected, **CLOSE)
    assert handle.stats()["sparse" if WAYS[way][0] is None else "decode"] > 0


@pytest.mark.parametrize(
    ("way", "length"),
    # A prompt in the budget is not in the bank yet when its sequences are repeated.
    [
        *((way, 120) for way in WAYS if "prefill" not in way),
        ("last, packed", 10),
        ("uniform, one filter, packed", 10),
    ],
)
def test_cache_repeats_selects_and_reorders_sequences(way, length, serving, ids):
    model, _, new_cache = serving(way)
    prompts, sizes, cache = ids(length + 3, batch=2), (length, 1), new_cache()
    fed(model, prompts, sizes, cache)
    for change, argument, rows in (
        (cache.batch_repeat_interleave, 2, [0, 0, 1, 1]),
        (cache.batch_select_indices, torch.tensor([3, 0, 1]), [3, 0, 1]),
        (cache.reorder_cache, torch.tensor([2, 0, 0]), [2, 0, 0]),
    ):
        change(argument)
        new = ids(3, batch=len(rows), seed=prompts.shape[1])
        prompts = torch.cat([prompts[rows], new], dim=1)
        actual = fed(model, new, (1,), cache)
        torch.testing.assert_close(actual, fed(model, prompts, sizes, new_cache())[:, -3:], **CLOSE)
    if not isinstance(cache, DynamicCache):
        # After a reset a batch may have fewer sequences.
        cache.reset()
        expected = fed(model, prompts[:2], sizes, new_cache())
        torch.testing.assert_close(fed(model, prompts[:2], sizes, cache), expected, **CLOSE)


def stored(cache: Any) -> Any:
    """Return a cache from a file of torch.save."""
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_way
def test_cropped_cache_and_its_copies_continue(way, serving, ids):
    model, _, new_cache = serving(way)
    text, sizes = ids(214), (130, 1)
    cache, whole = new_cache(), new_cache()
    first = fed(model, text[:, :136], sizes, whole)
    # The same prompt, and tokens that are taken back; inference mode ends.
    with torch.inference_mode():
        fed(model, torch.cat([text[:, :134], ids(3, seed=5)], dim=1), sizes, cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 134
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), stored(cache)]
    for each in (*copies, cache):
        again = fed(model, text[:, 134:136], (1,), each)
        torch.testing.assert_close(again, first[:, 134:], **CLOSE)
    # A second turn, and one that a copy did not have.
    second = fed(model, text[:, 136:], (76, 1), whole)
    for each in (cache, copies[0]):
        torch.testing.assert_close(fed(model, text[:, 136:], (76, 1), each), second, **CLOSE)
    assert cache.get_seq_length() == 214 and copies[1].get_seq_length() == 136
