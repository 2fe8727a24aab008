"""Pages that vLLM's manager frees and admits for a layer that drops tokens, without an engine."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import artifacts
from runtime.caches.paging import Paging
from runtime.caches.snapkv import SnapKV

PAGE, LONGEST = 16, 512
STREAM = Paging(front=20, window=50)
SNAPS = [SnapKV.paging(artifacts.SnapKV(budget=budget, window=8)) for budget in (0.25, 40)]


def spec_of(pagings: list[Paging]) -> Any:
    # Not before the other files have set vLLM's environment.
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from runtime.vllm.specs import paged_spec

    full = FullAttentionSpec(block_size=PAGE, num_kv_heads=2, head_size=64, dtype=torch.float32)
    return paged_spec(full, frozenset(pagings), LONGEST)


def manage(pagings: list[Paging], pages: int) -> tuple[Any, list[Any]]:
    """Return a manager with one request "r", and its pages."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from runtime.vllm.specs import PagedManager

    null = KVCacheBlock(pages)
    null.is_null = True
    pool: Any = SimpleNamespace(null_block=null, free_blocks=list)
    manager = PagedManager(
        spec_of(pagings),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=PAGE,
    )
    held: list[Any] = [KVCacheBlock(page) for page in range(pages)]
    manager.req_to_blocks["r"] = held
    return manager, held


def pages_of(held: list[Any]) -> list[int]:
    return [page.block_id for page in held if not page.is_null]


def test_window_frees_pages_behind_the_front():
    manager, held = manage([STREAM], 20)
    for computed in range(0, 20 * PAGE, 7):
        manager.remove_skipped_blocks("r", computed, 100)
        # Rows that a later token reads.
        rows = [row for row in range(20 * PAGE) if row < 20 or row > computed - 50]
        assert pages_of(held) == sorted({row // PAGE for row in rows})


def test_selection_frees_pages_once_prompt_is_computed():
    # Of 200 tokens one head keeps 50, the other 40: 4 pages. Page 12 holds generated tokens, too.
    manager, held = manage(SNAPS, 14)
    for computed in (0, 100, 199):
        manager.remove_skipped_blocks("r", computed, 200)
        assert pages_of(held) == list(range(14))
    for computed in (200, 201, 220):
        manager.remove_skipped_blocks("r", computed, 200)
        assert pages_of(held) == [0, 1, 2, 3, 12, 13]
    with pytest.raises(artifacts.HeadwiseError, match="whose prompt grows is not served"):
        manager.remove_skipped_blocks("r", 220, 210)
    # The next request of this name starts from scratch.
    manager.pop_blocks_for_free("r")
    manager.remove_skipped_blocks("r", 0, 300)


def test_window_takes_prompt_that_grows():
    manager, _ = manage([STREAM], 20)
    manager.remove_skipped_blocks("r", 200, 150)
    manager.remove_skipped_blocks("r", 250, 300)


@pytest.mark.parametrize(
    ("pagings", "pages"),
    [
        # Of 50 + 64 - 1 tokens, which may begin within a page, and of 20.
        ([STREAM], 8 + 1 + 2),
        ([Paging(front=0, window=1000)], LONGEST // PAGE),
        (SNAPS, LONGEST // PAGE),
    ],
)
def test_admission_counts_most_pages_of_a_request(pagings, pages):
    spec = spec_of(pagings)
    assert spec.max_admission_blocks_per_request(64, LONGEST) == pages
    config: Any = SimpleNamespace(
        max_in_flight_tokens=64,
        model_config=SimpleNamespace(max_model_len=LONGEST),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    assert spec.max_memory_usage_bytes(config) == pages * spec.page_size_bytes


def test_layers_share_a_manager_if_their_heads_drop_the_same():
    specs = [spec_of(each) for each in (SNAPS, SNAPS[::-1])]
    specs.append(pickle.loads(pickle.dumps(specs[0])))
    assert specs[0].is_uniform_with_collection({str(i): spec for i, spec in enumerate(specs)})
    assert not spec_of(SNAPS[:1]).is_uniform_with_collection({"a": specs[0]})
