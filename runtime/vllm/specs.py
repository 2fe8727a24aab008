"""Specification of layers that drop tokens for vLLM's scheduler, which takes their pages back.

Importing this module imports vLLM and registers this kind of cache: in the process of the
scheduler, too, which imports it when the specification of a layer arrives there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from artifacts import HeadwiseError
from runtime.caches.paging import Paging


@dataclass(frozen=True, kw_only=True)
class PagedSpec(SlidingWindowSpec):
    """Cache of a layer whose pages have a gap.

    vLLM knows it as a sliding window. Without a window, that is as long as the longest sequence: a
    prompt is cached until it is computed.

    Attributes:
        pagings: of its KV heads. A set, so that layers that differ in the order of their heads
            share a manager.
    """

    pagings: frozenset[Paging]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """True if all are equal, and share one manager."""
        return all(spec == self for spec in kv_cache_specs.values())

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Pages of the window and of the front, at most those of the longest sequence."""
        front = max(paging.front_tokens(max_model_len) for paging in self.pagings)
        window = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        pages = int(window) + -(-front // self.block_size)
        return min(pages, -(-max_model_len // self.block_size))


class PagedManager(SlidingWindowManager):
    """Manager that frees the pages of the gap, and finds no cached prefix: parts of it are gone."""

    def __init__(self, kv_cache_spec: PagedSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._pagings = kv_cache_spec.pagings
        self._selects = any(paging.select is not None for paging in self._pagings)
        # Lengths of the prompts that were computed, and of which tokens were selected.
        self._prompts: dict[str, int] = {}

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free pages that the next token does not read, see vLLM's managers.

        Raises:
            HeadwiseError: a prompt grew after tokens of it were selected (a session that is fed
                with more input).
        """
        prompt = num_prompt_tokens or 0
        length = processed_computed_tokens + 1 - self.extra_retained_tokens
        if self._selects:
            if prompt > self._prompts.get(request_id, prompt):
                raise HeadwiseError(
                    "a request whose prompt grows is not served where kv_cache drops tokens"
                )
            if 0 < prompt < length:
                self._prompts[request_id] = prompt
        begins, ends = zip(*(paging.gap(length, prompt) for paging in self._pagings), strict=True)
        first = -(-max(begins) // self.block_size)
        self._remove_blocks_in_range(request_id, first, min(ends) // self.block_size)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """See SingleTypeKVCacheManager.pop_blocks_for_free."""
        self._prompts.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **__: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        """Find nothing."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def cache_blocks(self, *_: Any, **__: Any) -> None:
        """Cache nothing: no prefix is found, and selected tokens are copied over others."""


def paged_spec(full: AttentionSpec, pagings: frozenset[Paging], longest: int) -> PagedSpec:
    """Make the specification of a layer from that of one which keeps every token.

    Args:
        full: the other specification.
        pagings: see PagedSpec.
        longest: tokens of the longest sequence.
    """
    names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode")
    shape = {name: getattr(full, name) for name in names}
    window = max(paging.window or longest for paging in pagings)
    return PagedSpec(pagings=pagings, sliding_window=window, **shape)


# First those of vLLM, which adds its own only to a registry that is empty.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(PagedSpec, PagedManager, PagedSpec)
