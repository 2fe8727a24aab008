"""Layers that keep their first and last tokens (StreamingLLM, section 3.2): pages between them go back to vLLM's pool.

Importing this module imports vLLM, and makes the kind of cache known to it: in the process of the scheduler, too, which
reads it when the specification of a layer arrives there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class StreamingSpec(SlidingWindowSpec):
    """A window that slides, behind the first `sinks` tokens, which stay."""

    sinks: int

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The window's pages and those of the first tokens; see SlidingWindowSpec."""
        window = int(super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len))
        return window + first_pages(self)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Whether one manager can hold all of these layers."""
        return all(
            isinstance(spec, StreamingSpec) and (spec.sinks, spec.sliding_window) == (self.sinks, self.sliding_window)
            for spec in kv_cache_specs.values()
        )


class StreamingManager(SlidingWindowManager):
    """Frees the pages between the first tokens and the window. Finds no cached prefix: its middle is gone."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See SingleTypeKVCacheManager."""
        end = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, first_pages(self.kv_cache_spec), end)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **__: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        """See SingleTypeKVCacheManager."""
        return tuple([] for _ in kv_cache_group_ids), 0


def first_pages(spec: Any) -> int:
    """How many pages hold the first tokens."""
    return -(-spec.sinks // spec.block_size)


def spec_of(layer: Any, config: Any, sinks: int, window: int) -> StreamingSpec:
    """The cache of a layer of vLLM that keeps its first tokens and a window of the last ones."""
    full = type(layer).get_kv_cache_spec(layer, config)
    names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode")
    return StreamingSpec(sliding_window=window, sinks=sinks, **{name: getattr(full, name) for name in names})


# Those of vLLM first: it adds its own only to a registry that is empty.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(StreamingSpec, StreamingManager, StreamingSpec)
