"""The backends that vLLM gets by name: OnCPU over its CPU backend, OnGPU over what it would have chosen on a GPU.

Neither is defined before vLLM asks for it: which class is the parent depends on the engine.
"""

from __future__ import annotations

import functools
from typing import Any

from runtime.vllm.builder import SparseBuilder
from runtime.vllm.counters import log
from runtime.vllm.forward import SparseImpl
from runtime.vllm.options import options_of
from runtime.vllm.pages import PAGE
from runtime.vllm.served import makes_drafts

# The backends whose cache our kernels read, and whether layers over them are ours alone.
_OURS = {"CPU_ATTN": True, "FLASH_ATTN": False, "TRITON_ATTN": False}


def __getattr__(name: str) -> Any:
    if name == "OnCPU":
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return over(CPUAttentionBackend, name, "CPU_ATTN")
    if name == "OnGPU":
        return over(_chosen(), name, "CUSTOM")
    raise AttributeError(name)


@functools.cache
def over(parent: Any, name: str, known_as: str) -> Any:
    """A backend that is `parent` but for sparse prefill, and the parent itself for an engine without an artifact.

    Args:
        parent: an AttentionBackend of vLLM.
        name: of the class, which this module has to know.
        known_as: what vLLM's registry calls it.
    """
    impl = _mixed(SparseImpl, parent.get_impl_cls(), ours=_OURS[parent.get_name()])
    builder = _mixed(SparseBuilder, parent.get_builder_cls(), parent=parent.get_builder_cls())
    members = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{parent.__name__} with sparse prefill.",
        "get_name": staticmethod(lambda: known_as),
        "get_impl_cls": staticmethod(lambda: impl if _asked() else parent.get_impl_cls()),
        # This class is asked for where no configuration is known.
        "get_builder_cls": staticmethod(lambda: builder),
        "get_preferred_block_size": classmethod(_block_size),
    }
    return type(parent)(name, (parent,), members)


def _mixed(mixin: type, base: Any, **members: Any) -> Any:
    return type(base)(f"Sparse{base.__name__}", (mixin, base), members)


def _block_size(backend: Any, default: int) -> int:
    """What the parent prefers, but no less than a tile of our kernels where an engine has an artifact."""
    preferred = int(super(backend, backend).get_preferred_block_size(default))
    if not _asked() or preferred >= PAGE or not backend.supports_block_size(PAGE):
        return preferred
    return PAGE


def _asked() -> bool:
    """Whether what is being built is served by an artifact: an engine, and not what makes drafts for it."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and options_of(config.additional_config) is not None and not makes_drafts(config)


def _chosen() -> Any:
    """What vLLM would have chosen on this GPU; FlashAttention where kernels cannot read the cache of that."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = get_current_vllm_config()
    model = config.model_config
    wanted = AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=config.cache_config.cache_dtype,
        block_size=None,
    )
    parent = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, attn_selector_config=wanted))
    if parent.get_name() in _OURS:
        return parent
    log.info("Headwise takes FLASH_ATTN for a parent, not %s, whose cache it cannot read", parent.get_name())
    return FlashAttentionBackend
