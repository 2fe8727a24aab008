"""Specifications of layers that drop tokens for vLLM's scheduler, which takes their pages back.

Importing this module imports vLLM and registers these kinds of cache: in the process of the
scheduler, too, which imports it when the specification of a layer arrives there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import AttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from artifacts import HeadwiseError
from runtime.caches.pages import Paging


class _OneManager:
    """Specification whose equals share one manager."""

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class StreamingSpec(_OneManager, SlidingWindowSpec):
    """First `sinks` tokens, which stay, and a sliding window."""

    sinks: int

    @property
    def first_pages(self) -> int:
        """Pages that hold the first tokens."""
        return -(-self.sinks // self.block_size)

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Pages of the window and of the first tokens."""
        window = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return int(window) + self.first_pages


@dataclass(frozen=True, kw_only=True)
class PromptSpec(_OneManager, AttentionSpec):
    """Every token until a prompt is computed; then its selected part and all that is generated."""

    heads: tuple[Paging, ...]

    def pages_of(self, prompt: int) -> int:
        """Pages that hold the part of a prompt that the head with the largest budget keeps."""
        count = max(each.left(prompt) for each in self.heads)
        return -(-count // self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes of the longest sequence: a prompt is kept whole until it is computed."""
        pages = -(-vllm_config.model_config.max_model_len // self.block_size)
        return int(pages * self.page_size_bytes)


class _NoPrefixes:
    """Manager that finds no cached prefix, since parts of it are gone."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **__: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0


class StreamingManager(_NoPrefixes, SlidingWindowManager):
    """Manager that frees the pages between the first tokens and the window."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See SlidingWindowManager.remove_skipped_blocks."""
        end = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, self.kv_cache_spec.first_pages, end)


class PromptManager(_NoPrefixes, SingleTypeKVCacheManager):
    """Manager that frees the pages between the kept part of a prompt and its end."""

    def __init__(self, kv_cache_spec: PromptSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        # Tokens of the prompt by which a request's pages were freed.
        self._prompts: dict[str, int] = {}

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free pages that are read no more, see vLLM's managers.

        Raises:
            HeadwiseError: a prompt grew after parts of it were dropped (a session that is fed with
                more input).
        """
        prompt = num_prompt_tokens or 0
        if prompt > self._prompts.get(request_id, prompt):
            raise HeadwiseError(
                "a request whose prompt grows is not served where kv_cache drops tokens"
            )
        if not prompt or processed_computed_tokens < prompt:
            return
        self._prompts[request_id] = prompt
        first = self.kv_cache_spec.pages_of(prompt)
        self._remove_blocks_in_range(request_id, first, prompt // self.block_size)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """See SingleTypeKVCacheManager.pop_blocks_for_free."""
        self._prompts.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))

    def cache_blocks(self, *_: Any, **__: Any) -> None:
        """Cache nothing: pages are overwritten when a prompt is computed."""


def shape_of(full: AttentionSpec) -> dict[str, Any]:
    """Fields that a specification shares with that of a layer which keeps every token."""
    names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode")
    return {name: getattr(full, name) for name in names}


# First those of vLLM, which adds its own only to a registry that is empty.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(StreamingSpec, StreamingManager, StreamingSpec)
KVCacheSpecRegistry.register(PromptSpec, PromptManager, PromptSpec)
