"""Keys and values in a context bank: packed fetches against the cache that keeps all on the device.

A lane that does everything as late as it may stands in for a GPU's: what does not wait where it
must reads NaN."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from artifacts import HeadwiseError
from kernels.index import PAD
from runtime.caches.growing import BankedLayer
from runtime.omnikv.bank import Bank, OffloadedTensor, replaced
from runtime.omnikv.lane import Lane
from tests.runtime.omnikv import CLOSE, DECODE, LAYERS, steps

PACKED = {"offload": "packed"}


class LateLane(Lane):
    """Copies and fetches happen when somebody waits for them, not before."""

    fetched: list[int]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._sent: list[tuple[Tensor, Tensor]] = []
        self.fetched = []

    def memory(self, nbytes: int) -> Tensor:
        return super().memory(nbytes).fill_(255)

    def send(self, target: Tensor, rows: Tensor) -> None:
        self._sent.append((target, rows))

    def arrived(self) -> None:
        sent, self._sent = self._sent, []
        for target, rows in sent:
            target.copy_(rows)

    def follow(self) -> None:
        self.arrived()

    def start(self, tokens: Tensor, gather: Callable[[Tensor], Any]) -> Callable[[], Any]:
        listed, done = tokens.clone(), list[Any]()

        def wait() -> Any:
            if not done:
                done.append(gather(listed))
            return done[0]

        return wait

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        self.fetched.append(rows)
        return super().staging(rows, width, dtype).fill_(float("nan"))


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.omnikv.bank.Lane", LateLane)
    monkeypatch.setattr("runtime.omnikv.bank._LEAST", 16)


def padded(prompts: list[Tensor]) -> dict[str, Tensor]:
    """A left-padded batch as a model takes it."""
    width = max(p.shape[1] for p in prompts)
    real = torch.stack([torch.arange(width) >= width - p.shape[1] for p in prompts]).long()
    tokens = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    return {
        "prompt": tokens,
        "attention_mask": real,
        "position_ids": (real.cumsum(1) - 1).clamp(min=0),
    }


@pytest.mark.parametrize("budget", [24, 0.125])
@pytest.mark.parametrize("lengths", [(150,), (150, 90, 120), (150, 7, 30)])
def test_packed_is_what_the_device_computes(lengths, budget, build, decoding, ids) -> None:
    model, forced = build(**LAYERS), ids(20, batch=len(lengths), seed=9)
    given = padded([ids(n, seed=n) for n in lengths])
    with decoding(model, budget=budget).apply(model, backend="auto") as handle:
        expected = steps(model, forced=forced, cache=handle.new_cache(offload="never"), **given)
        cache = handle.new_cache(**PACKED)
        found = steps(model, forced=forced, cache=cache, **given)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert all(layer.keys is None for layer in cache.layers if isinstance(layer, BankedLayer))


@pytest.mark.parametrize("lengths", [(150,), (150, 90)])
def test_several_queries_at_once_see_what_is_before_them(lengths, build, decoding, ids) -> None:
    model, given = build(**LAYERS), padded([ids(n, seed=n) for n in lengths])
    drafts = ids(12, batch=len(lengths), seed=5)
    with decoding(model).apply(model, backend="auto") as handle:
        found = []
        for offload in ("never", "packed"):
            cache = handle.new_cache(offload=offload)
            steps(model, forced=drafts[:, :0], cache=cache, **given)
            real = torch.nn.functional.pad(given["attention_mask"], (0, 12), value=1)
            parts = []
            for start, stop in ((0, 1), (1, 5), (5, 7), (7, 12)):
                seen = real[:, : real.shape[1] - 12 + stop]
                position = (seen.cumsum(1) - 1)[:, start - stop :]
                options = {"attention_mask": seen, "position_ids": position, "use_cache": True}
                parts.append(model(drafts[:, start:stop], past_key_values=cache, **options).logits)
            found.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def states(length: int, batch: int = 1, layers: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Random keys (batch, 2, length, 8) and values (batch, 2, length, 6) of some layers."""
    return [
        (torch.randn(batch, 2, length, 8), torch.randn(batch, 2, length, 6)) for _ in range(layers)
    ]


def attended(
    bank: Bank, past: int, new: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor] | None]:
    """Append to each layer, and what each then attends to."""
    found = []
    for layer, (k, v) in enumerate(new):
        assert bank.takes(k, v)
        held = bank.attended(bank.append(layer, past, k, v))
        found.append(None if held is None else held[:2])
    return found


def same_rows(found: Tensor, expected: Tensor) -> bool:
    """Whether keys or values (1, G, n, D) are the same rows, whatever their order, the last being
    the last."""
    rows = [sorted(x[0].transpose(0, 1).flatten(1).tolist()) for x in (found, expected)]
    return rows[0] == rows[1] and torch.equal(found[:, :, -1], expected[:, :, -1])


def test_only_newly_chosen_rows_are_fetched() -> None:
    bank, layers = Bank(2, 0), states(60)
    attended(bank, 0, [(k[:, :, :50], v[:, :, :50]) for k, v in layers])
    chosen = [
        [1, 5, 6, 40, 50],
        [1, 6, 7, 50, 51],
        [1, 6, 7, 50, 52],
        [0, 1, 2, 3, 53],
        [0, 1, 53, 54, PAD],
    ]
    for past, tokens in enumerate(chosen, 50):
        bank.fetch(torch.tensor([tokens], dtype=torch.int32), past)
        now = slice(past, past + 1)
        wanted = [token for token in tokens if token <= past]
        found = attended(bank, past, [(k[:, :, now], v[:, :, now]) for k, v in layers])
        for held, all_of_it in zip(found, layers, strict=True):
            assert all(
                same_rows(rows, x[:, :, wanted]) for rows, x in zip(held, all_of_it, strict=True)
            )
    assert bank.lane.fetched == [2 * n for n in (4, 2, 3, 1)]


def test_what_replaces_a_cropped_token_is_fetched_anew() -> None:
    bank, layers, other = Bank(2, 0), states(50), states(3)
    attended(bank, 0, layers)
    bank.fetch(torch.tensor([[1, 48, 50]], dtype=torch.int32), 50)
    bank.crop(47)
    attended(bank, 47, other)
    assert attended(bank, 50, states(1)) == [None, None], "the choice was for what there was before"
    bank.crop(50)
    bank.fetch(torch.tensor([[1, 50, PAD]], dtype=torch.int32), 50)
    twin = copy.deepcopy(bank)
    assert twin.lane is not bank.lane, "two copies may be at work in two threads"
    assert attended(twin, 50, states(1)) == [None, None]
    for each in (bank, twin):
        each.crop(50)
        each.fetch(torch.tensor([[1, 48, 50]], dtype=torch.int32), 50)
        for held, old, new in zip(attended(each, 50, states(1)), layers, other, strict=True):
            for found, before, after in zip(held, old, new, strict=True):
                assert torch.equal(found[:, :, :2].sum(2), before[:, :, 1] + after[:, :, 1])


@pytest.mark.parametrize("sequences", [[1, 0], [1, 1, 0]])
def test_sequences_change_places_in_bank_and_slots(sequences) -> None:
    bank, layers = Bank(2, 0), states(51, batch=2)
    attended(bank, 0, [(k[:, :, :50], v[:, :, :50]) for k, v in layers])
    tokens = torch.tensor([[1, 2, 3, 50, 51], [4, 5, 50, 51, PAD]], dtype=torch.int32)
    bank.fetch(torch.tensor([[1, 2, 3, 50, PAD], [4, 5, 50, PAD, PAD]], dtype=torch.int32), 50)
    attended(bank, 50, [(k[:, :, 50:], v[:, :, 50:]) for k, v in layers])
    bank.select(torch.tensor(sequences), 51)
    bank.fetch(tokens[sequences], 51)
    held = attended(bank, 51, states(1, batch=len(sequences)))
    for (keys, values), (k, v) in zip(held, layers, strict=True):
        for b, source in enumerate(sequences):
            chosen = [t for t in tokens[source].tolist() if t < 51]
            for found, x in ((keys, k), (values, v)):
                torch.testing.assert_close(
                    found[b, :, : len(chosen)].sum(1), x[source][:, chosen].sum(1)
                )
    # What was on the device stayed there: of each sequence only the latest token is fetched.
    assert bank.lane.fetched == [2 * 5, 2 * len(sequences)]


def test_replaced_gives_every_wanted_token_one_slot() -> None:
    generator = torch.Generator().manual_seed(0)
    held = torch.full((3, 12), -1)
    for _ in range(30):
        counts = torch.randint(0, 11, (3,), generator=generator)
        rows = [torch.randperm(20, generator=generator)[: int(n)].sort().values for n in counts]
        chosen = torch.full((3, 12), 2**31 - 1)
        for b, row in enumerate(rows):
            chosen[b, : len(row)] = row
        before = held.clone()
        sequences, tokens, places = replaced(held, chosen, counts)
        for b, row in enumerate(rows):
            assert held[b, : len(row)].sort().values.tolist() == row.tolist()
            assert (held[b, len(row) :] == -1).all()
        fetched = torch.zeros_like(held, dtype=torch.bool)
        fetched[sequences, places] = True
        assert torch.equal(held[fetched], tokens)
        assert torch.equal(held[~fetched & (held >= 0)], before[~fetched & (held >= 0)])
        assert not any(
            token in before[b, : counts[b]] for b, token in zip(sequences, tokens, strict=True)
        )


@pytest.mark.parametrize("selector", ["last", "uniform"])
def test_turns_chunks_crops_and_copies(selector, build, decoding, ids) -> None:
    model, text = build(**LAYERS), ids(300)
    found = []
    with decoding(model, selector=selector).apply(model, backend="auto") as handle:
        for offload in ("never", "packed"):
            cache = handle.new_cache(offload=offload)
            parts = [steps(model, text[:, :20], text[:, 20:40], cache)]
            parts.append(steps(model, text[:, 40:120], text[:, 120:126], cache))
            cache.crop(-5)
            parts.append(steps(model, text[:, 130:200], text[:, 200:203], cache))
            twin = copy.deepcopy(cache)
            parts.append(steps(model, text[:, 203:204], text[:, 204:207], cache))
            parts.append(steps(model, text[:, 213:214], text[:, 214:217], twin))
            parts.append(steps(model, text[:, 207:208], text[:, 208:211], cache))
            found.append(torch.cat(parts, dim=1))
            assert cache.get_seq_length() == 121 + 70 + 3 + 8
            assert cache.layers[3].get_mask_sizes(2) == (204, 0)
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("prompt", [10, 120])
def test_sequences_are_repeated_selected_and_reordered(prompt, build, decoding, ids) -> None:
    model, text, forced = build(**LAYERS), ids(prompt, batch=2), ids(30, batch=3, seed=9)
    order = torch.tensor([2, 0, 0])
    found = []
    with decoding(model, budget=12).apply(model, backend="auto") as handle:
        for offload in ("never", "packed"):
            cache = handle.new_cache(offload=offload)
            parts = [steps(model, text, forced[:2, :3], cache)[:, -1]]
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
            parts += steps(model, forced[:, 4:5], forced[:, 5:9], cache).unbind(1)
            cache.reorder_cache(order)
            parts += steps(model, forced[:, 9:10], forced[:, 10:14], cache).unbind(1)
            cache.reset()
            parts += steps(model, text, forced[:2, :3], cache).unbind(1)
            found.append(torch.cat(parts))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_kept_scores_are_repeated_with_their_sequences(build, decoding, ids) -> None:
    """With every layer in one bank they were repeated twice, or by rows that are not there."""
    model, text, forced = build(**LAYERS), ids(120, batch=2), ids(8, batch=4, seed=9)
    found = []
    with decoding(model, selector="uniform").apply(model, backend="auto") as handle:
        for offload in ("never", "packed"):
            cache = handle.new_cache(offload=offload)
            steps(model, text, forced[:2, :3], cache)
            cache.batch_repeat_interleave(2)
            found.append(steps(model, forced[:, 3:4], forced[:, 4:], cache))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_a_short_context_stays_on_the_device(build, decoding, ids) -> None:
    model = build(**LAYERS)
    with decoding(model, budget=40).apply(model) as handle:
        cache = handle.new_cache(**PACKED)
        steps(model, ids(30), ids(10, seed=1), cache)
        assert handle.cache_bytes(cache).bank == 0
        steps(model, ids(1), ids(1, seed=2), cache)
        assert handle.cache_bytes(cache).bank > 0


def test_bytes_are_what_was_given_out(build, decoding, ids) -> None:
    model = build(**LAYERS)
    with decoding(model, selector="uniform").apply(model) as handle:
        held = {}
        for offload in ("never", "packed"):
            cache = handle.new_cache(offload=offload)
            steps(model, ids(600), ids(4, seed=1), cache)
            held[offload] = handle.cache_bytes(cache)
        scores, token = 7 * 604 * 4, 2 * 2 * 64 * 4
    assert held["never"].bank == 0
    # Two layers are dense, two filter, and two are in banks, each with the budget's tokens on the
    # device.
    assert held["packed"].device == 4 * (600 + 256) * token + 2 * scores + 2 * DECODE.budget * token
    assert 2 * 604 * token <= held["packed"].bank <= 1.2 * 2 * 604 * token


def test_a_model_whose_handle_was_undone_reads_all_of_it(build, decoding, ids) -> None:
    model, prompt, forced = build(**LAYERS), ids(150), ids(5, seed=9)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    loaded = decoding(model)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found = steps(model, prompt, forced, loaded.new_cache(model, **PACKED))
        torch.testing.assert_close(found, expected, **CLOSE)


def test_layers_unlike_the_first_of_their_group_stay_on_the_device(build, decoding, ids) -> None:
    model = build(**LAYERS)
    cache = decoding(model, filter_layers=(2,)).new_cache(model, **PACKED)
    for layer, dim in ((3, 64), (4, 32), (5, 64)):
        cache.update(torch.randn(1, 2, 50, dim), torch.randn(1, 2, 50, dim), layer)
    more = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32)
    assert not isinstance(cache.update(*more, 4)[0], OffloadedTensor)
    assert [layer.keys is None for layer in cache.layers[3:]] == [True, False, True]


def test_layers_of_each_device_have_a_bank_with_a_place_for_each(build, decoding) -> None:
    """Places were counted over all devices: the second device's bank had none for its layers."""
    model = build(**LAYERS)
    loaded = decoding(model, filter_layers=(2,))
    model.model.layers[4:].to("meta")
    cache = loaded.new_cache(model, **PACKED)
    banked = cache.layers[3:]
    assert banked[0].bank is not banked[1].bank and banked[1].bank is banked[2].bank
    assert [(layer.bank.layers, layer.place) for layer in banked] == [(1, 0), (2, 0), (2, 1)]


def test_an_unknown_offload_is_refused(build, decoding) -> None:
    model = build(**LAYERS)
    with pytest.raises(HeadwiseError, match="unknown offload 'cpu'; known: auto, never, packed"):
        decoding(model).new_cache(model, offload="cpu")
