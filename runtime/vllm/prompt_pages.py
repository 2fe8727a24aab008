"""Layers that keep a part of each prompt (SnapKV): pages between that and the prompt's end go back to vLLM's pool.

Importing this module imports vLLM, and makes the kind of cache known to it, as runtime.vllm.streaming does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

import artifacts
from artifacts import HeadwiseError
from runtime.caches.snapkv import left_of


@dataclass(frozen=True, kw_only=True)
class PromptSpec(AttentionSpec):
    """Everything until a prompt is computed; then what its KV heads keep of it by `policies`, and all that follows."""

    policies: tuple[artifacts.SnapKV, ...]

    def pages_of(self, prompt: int) -> int:
        """How many pages hold what is kept of a prompt of so many tokens: as many as the head with the most needs."""
        return -(-max(left_of(policy, prompt, prompt) for policy in self.policies) // self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """A prompt as long as the longest sequence is kept whole until it is computed."""
        return -(-vllm_config.model_config.max_model_len // self.block_size) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Whether one manager can hold all of these layers."""
        return all(spec == self for spec in kv_cache_specs.values())


class PromptManager(SingleTypeKVCacheManager):
    """Frees the pages between what is kept of a prompt and its end. Finds no cached prefix: parts of it are gone."""

    def __init__(self, kv_cache_spec: PromptSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        # Tokens of the prompt by which a request's pages were freed.
        self._prompts: dict[str, int] = {}

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """See SingleTypeKVCacheManager.

        Raises:
            HeadwiseError: a prompt grew after parts of it were dropped (a session that is fed with more input).
        """
        prompt = num_prompt_tokens or 0
        if prompt > self._prompts.get(request_id, prompt):
            raise HeadwiseError("a request whose prompt grows is not served where kv_cache keeps a part of each prompt")
        if not prompt or processed_computed_tokens < prompt:
            return
        self._prompts[request_id] = prompt
        self._remove_blocks_in_range(request_id, self.kv_cache_spec.pages_of(prompt), prompt // self.block_size)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """See SingleTypeKVCacheManager."""
        self._prompts.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))

    def cache_blocks(self, *_: Any, **__: Any) -> None:
        """Nothing: pages are written anew when a prompt is computed."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **__: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        """See SingleTypeKVCacheManager."""
        return tuple([] for _ in kv_cache_group_ids), 0


def spec_of(layer: Any, config: Any, policies: tuple[artifacts.SnapKV, ...]) -> PromptSpec:
    """The cache of a layer of vLLM whose KV heads, those of all processes, keep parts of each prompt."""
    full = type(layer).get_kv_cache_spec(layer, config)
    names = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode")
    return PromptSpec(policies=tuple(sorted(set(policies), key=repr)), **{name: getattr(full, name) for name in names})


# Those of vLLM first: it adds its own only to a registry that is empty.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(PromptSpec, PromptManager, PromptSpec)
