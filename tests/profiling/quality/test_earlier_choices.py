"""Choices of earlier layers' heads, against masks of what those heads choose and the softmax written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from artifacts import Artifact, AShape, BlockSparse, HeadwiseError, Imported, Prefill, VerticalSlash
from kernels.index import TILE
from kernels.patterns import LayerPlan
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.chosen_tiles import mass_scores, top_k_index
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import make_prompts
from profiling.quality.earlier_choices import WAYS, compared, earlier_choices, report
from runtime.fingerprint import fingerprint
from runtime.plans import kernel_patterns
from tests.search.conftest import save_tiny

LENGTH = 700
PATTERNS = {
    "bs_3": BlockSparse(blocks=3),
    "vs_128_64": VerticalSlash(vertical=128, slash=64),
    "a_64_64": AShape(sink=64, window=64),
}
SOURCE = Imported(format="minference", file="best.json", sha256="0" * 64, scores="recall")
# Tiles of 64 before the tail of the last 64 queries, but the first.
ROWS = range(1, (LENGTH - TILE) // TILE)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny(tmp_path_factory.mktemp("earlier") / "tiny")), dtype="float32")


def artifact(loaded: LoadedModel, *rows: tuple[str, ...]) -> Artifact:
    used = {name: pattern for name, pattern in PATTERNS.items() if any(name in row for row in rows)}
    return Artifact(
        model=fingerprint(loaded.model, name="tiny"),
        search=None,
        patterns=used,
        prefill=Prefill(dense_below=128, dense_tail=TILE, layers=rows, imported=SOURCE),
    )


@pytest.fixture(scope="module")
def mixed(loaded: LoadedModel) -> Artifact:
    row = ("bs_3", "vs_128_64", "a_64_64") * 2
    return artifact(loaded, row, row[::-1], row)


def inputs_of(loaded: LoadedModel, ids: list[int]) -> dict[int, LayerInputs]:
    seen: dict[int, LayerInputs] = {}
    capture(loaded.model, torch.tensor([ids]), lambda inputs: seen.update({inputs.layer: inputs}))
    return seen


def kept(inputs: LayerInputs, head: int, mask: Tensor) -> float:
    """Attention mass of a head on a mask (S, S), mean over the rows that are measured."""
    keys = inputs.k[0, head // (inputs.q.shape[1] // inputs.k.shape[1])]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    weights = (inputs.q[0, head] @ keys.T * inputs.scale).masked_fill(~causal, float("-inf")).softmax(-1)
    some = slice(ROWS.start * TILE, ROWS.stop * TILE)
    return float((weights * mask)[some].sum(-1).mean())


@pytest.mark.parametrize("way", WAYS)
def test_a_head_sees_what_the_other_chooses(loaded: LoadedModel, mixed: Artifact, way: str) -> None:
    prompt = make_prompts("prose", loaded.tokenizer, length=LENGTH, samples=1, seed=0)[0]
    found, seen = (
        earlier_choices(loaded.model, mixed, {}, prompt, way=way),
        inputs_of(loaded, list(prompt.input_ids)),
    )
    patterns, heads = kernel_patterns(mixed, {}), 6
    causal = sum(row + 1 for row in ROWS)
    for layer, head, at, other in [(1, 4, 0, 3), (2, 0, 1, 5), (2, 1, 0, 0), (2, 4, 2, 4), (0, 0, 0, 0)]:
        row = mixed.prefill.layers[layer]
        assert row is not None
        name, chooser = row[head], seen[at]
        plan = LayerPlan([patterns[name]] * heads, 2)
        index = plan.build(chooser.q, chooser.k, scale=chooser.scale).of_heads(slice(other, other + 1))
        place = 0 if (at, other) == (layer, head) else 1 + at * heads + other
        if way == "estimate":
            assert found.recall[layer, head, place] == pytest.approx(
                kept(seen[layer], head, index.to_mask()[0, 0]), abs=1e-5
            )
            tiles = torch.cat([mask[0, 0] for _, mask in index.row_masks()])[ROWS.start : ROWS.stop].sum()
            assert found.density[layer, head, place] >= float(tiles) / causal - 1e-6
        else:
            # As many tiles as the head's own pattern computes, row by row.
            own = plan.build(seen[layer].q, seen[layer].k, scale=chooser.scale).of_heads(slice(head, head + 1))
            scores, mask = mass_scores(chooser.q, chooser.k, chooser.scale, at), torch.zeros(LENGTH, LENGTH)
            for tile in ROWS:
                part = own.changed(q_len=TILE, k_len=(tile + 1) * TILE, offsets=own.offsets[:, :, tile : tile + 2])
                share = float(part.computed_tiles()) / (tile + 1)
                rows = slice(tile * TILE, (tile + 1) * TILE)
                mask[rows] = top_k_index(scores, LENGTH, share).to_mask()[0, other, rows].float()
            assert found.recall[layer, head, place] == pytest.approx(kept(seen[layer], head, mask), abs=1e-5)
    assert np.isnan(found.change[1, 4, 1 + heads :]).all() and np.isnan(found.change[0, :, 1:]).all()
    assert np.isnan(found.change[[0, 0, 1, 1, 2, 2], [2, 5, 0, 3, 2, 5]]).all(), "an A-shape estimates nothing"


def test_one_chooser_is_measured_as_all_of_them_are(loaded: LoadedModel, mixed: Artifact) -> None:
    prompt = make_prompts("prose", loaded.tokenizer, length=LENGTH, samples=1, seed=1)[0]
    for way in WAYS:
        every = earlier_choices(loaded.model, mixed, {}, prompt, way=way)
        best = every.best
        assert (best[0] == 0).all() and (best[2, [0, 1, 3, 4]] > 0).all() and best[2, 2] == 0
        one = earlier_choices(loaded.model, mixed, {}, prompt, way=way, only=best)
        for name in ("change", "recall", "density"):
            for layer, head in zip(*np.nonzero(best), strict=True):
                places = [0, best[layer, head]]
                np.testing.assert_allclose(
                    getattr(one, name)[layer, head, places], getattr(every, name)[layer, head, places], rtol=1e-4
                )
        assert (np.isfinite(one.change).sum(-1)[best > 0] == 2).all()


def test_it_is_summed_up_over_prompts(loaded: LoadedModel, mixed: Artifact) -> None:
    prompts = make_prompts("prose", loaded.tokenizer, length=LENGTH, samples=3, seed=2)
    found = compared(loaded.model, mixed, {}, prompts)
    assert [one.way for one in found] == list(WAYS)
    for one in found:
        assert one.heads == 8 and one.ratio.low <= one.ratio.value <= one.ratio.high
        # Of a random model no head's choice is another's.
        assert one.changes[1] > one.changes[0] and one.recall[1] < one.recall[0]
    assert found[1].recall[0] >= found[0].recall[0] - 0.02, "scores know what estimates guess"
    assert len(report(found)) == 7
    with pytest.raises(HeadwiseError, match="no head after the first layer has a pattern that estimates"):
        compared(loaded.model, artifact(loaded, *[("a_64_64",) * 6] * 3), {}, prompts)


def test_a_choice_of_every_tile_changes_nothing(loaded: LoadedModel) -> None:
    whole = artifact(loaded, *[("bs_3",) * 6] * 3).model_copy(update={"patterns": {"bs_3": BlockSparse(blocks=20)}})
    prompt = make_prompts("prose", loaded.tokenizer, length=LENGTH, samples=1, seed=3)[0]
    found = earlier_choices(loaded.model, whole, {}, prompt)
    assert np.nanmax(found.change) < 1e-8 and np.nanmin(found.recall) > 1 - 1e-5
    np.testing.assert_allclose(found.density[np.isfinite(found.density)], 1.0)
