"""Backends that vLLM gets by name: OnCPU over its CPU backend, OnGPU over its default on a GPU.

A class is made when vLLM asks for it, since its parent depends on the engine.
"""

from __future__ import annotations

import functools
from typing import Any

from runtime.vllm.builder import SparseBuilder
from runtime.vllm.counters import log
from runtime.vllm.engine import makes_drafts
from runtime.vllm.forward import SparseImpl
from runtime.vllm.options import options_of
from runtime.vllm.step import PAGE

# Backends for GPUs whose cache our kernels read.
_READ = ("FLASH_ATTN", "TRITON_ATTN")


def __getattr__(name: str) -> Any:
    if name == "OnCPU":
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return sparse_backend(CPUAttentionBackend, name, "CPU_ATTN")
    if name == "OnGPU":
        return sparse_backend(_default_parent(), name, "CUSTOM")
    raise AttributeError(name)


@functools.cache
def sparse_backend(parent: Any, name: str, known_as: str) -> Any:
    """Make a backend with sparse prefill; without an artifact it has the parent's classes.

    Args:
        parent: an AttentionBackend of vLLM.
        name: of the class, under which vLLM looks for it in this module.
        known_as: its name in vLLM's registry.
    """

    class Impl(SparseImpl, parent.get_impl_cls()):  # type: ignore[misc]
        ours = known_as == "CPU_ATTN"

    class Builder(SparseBuilder, parent.get_builder_cls()):  # type: ignore[misc]
        parents = parent.get_builder_cls()

    class Backend(parent):
        __qualname__ = name

        @staticmethod
        def get_name() -> str:
            return known_as

        @staticmethod
        def get_impl_cls() -> Any:
            if _serves():
                return Impl
            return parent.get_impl_cls()

        @staticmethod
        def get_builder_cls() -> Any:
            # No configuration is known here: Builder.__new__ makes the parent's builder.
            return Builder

        @classmethod
        def get_preferred_block_size(cls, default_block_size: int) -> int:
            """Block size of the parent; with an artifact no less than a tile of our kernels."""
            preferred = int(super().get_preferred_block_size(default_block_size))
            if _serves() and preferred < PAGE and cls.supports_block_size(PAGE):
                return PAGE
            return preferred

    return Backend


def _serves() -> bool:
    """True while an engine with an artifact is built, and not its draft model."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or options_of(config.additional_config) is None:
        return False
    return not makes_drafts(config)


def _default_parent() -> Any:
    """Default backend of vLLM on this GPU; FlashAttention if our kernels cannot read its cache."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = get_current_vllm_config()
    wanted = AttentionSelectorConfig(
        head_size=config.model_config.get_head_size(),
        dtype=config.model_config.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        block_size=None,
    )
    path = current_platform.get_attn_backend_cls(None, attn_selector_config=wanted)
    parent = resolve_obj_by_qualname(path)
    if parent.get_name() in _READ:
        return parent
    name = parent.get_name()
    log.info("Headwise takes FLASH_ATTN for a parent, not %s, whose cache it cannot read", name)
    return FlashAttentionBackend
