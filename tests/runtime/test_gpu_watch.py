"""What only a GPU can show of watching: nothing waits for the device, and times come from its events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged
from runtime.attention.kernel import attend_layer
from runtime.attention.state import Layer, Settings
from runtime.watch import Watch

pytestmark = pytest.mark.gpu
PATTERNS = (
    make("vertical_slash", vertical=100, slash=200),
    make("block_sparse", blocks=4),
    make("a_shape", sink=64, window=256),
    make("dense"),
)


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def layer(watch: Watch | None) -> Layer:
    settings = Settings(dense_below=64, dense="sdpa", strict=True, backend="auto", watch=watch)
    return Layer(settings, 0, LayerPlan(PATTERNS, 2, dense_tail=64))


@pytest.mark.parametrize("ragged", [None, Ragged.left_padded((4096, 1000), 4096, 4096)])
def test_watching_and_falling_back_wait_for_nothing(
    ragged: Ragged | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 4096, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    watched = layer(Watch(min_recall=0.9))
    plain = layer(None)
    # The first call compiles, and brings lists to the device that stay there.
    attend_layer(watched, watched.plan, q, k, v, scale=None, softcap=None, ragged=ragged)
    request.getfixturevalue("_no_waiting")
    for _ in range(3):
        found = attend_layer(watched, watched.plan, q, k, v, scale=None, softcap=None, ragged=ragged)
        expected = attend_layer(plain, plain.plan, q, k, v, scale=None, softcap=None, ragged=ragged)
    torch.cuda.set_sync_debug_mode("default")
    assert watched.settings.watch is not None
    (seen,) = watched.settings.watch.read().values()
    assert [head.sequences for head in seen.heads] == [8.0] * 4 and min(seen.seconds.values()) > 0
    high = [at for at, head in enumerate(seen.heads) if not head.fallbacks]
    assert 3 in high and torch.equal(found[:, high], expected[:, high])
    assert sum(head.fallbacks for head in seen.heads) > 0
