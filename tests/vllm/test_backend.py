"""The backend that vLLM selects for a GPU, as far as a machine without one can test it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import artifacts
from runtime.omnikv.decode import OmniKV
from runtime.vllm import register
from runtime.vllm.builder import SparseBuilder
from runtime.vllm.filters import FilterDecode
from runtime.vllm.forward import SparseImpl

SECTION = artifacts.OmniKV(filter_layers=(1,), budget=40, window=1)
CHOOSES: dict[str, Any] = {"section": SECTION, "layers": (), "backend": "auto"}
_BACKENDS = "vllm.v1.attention.backends"


@pytest.fixture
def choose(monkeypatch):
    """Return choose(path, **additional): the CUSTOM class on a platform whose default is the
    class at `path`."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def choose(path, **additional):
        config = SimpleNamespace(
            model_config=SimpleNamespace(get_head_size=lambda: 64, dtype=torch.bfloat16),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            additional_config=additional,
        )
        monkeypatch.setattr(
            type(current_platform),
            "get_attn_backend_cls",
            classmethod(lambda *_, **__: f"{_BACKENDS}.{path}"),
        )
        for name in ("get_current_vllm_config", "get_current_vllm_config_or_none"):
            monkeypatch.setattr(f"vllm.config.{name}", lambda: config)
        register()
        return AttentionBackendEnum.CUSTOM.get_class()

    return choose


@pytest.mark.parametrize(
    "path", ["flash_attn.FlashAttentionBackend", "triton_attn.TritonAttentionBackend"]
)
def test_backend_parent_is_vllm_default(choose, path):
    from vllm.utils.import_utils import resolve_obj_by_qualname

    parent = resolve_obj_by_qualname(f"{_BACKENDS}.{path}")
    backend = choose(path, headwise="cfg.yaml")
    assert issubclass(backend, parent) and backend.get_name() == "CUSTOM"
    assert backend.get_supported_kernel_block_sizes() == parent.get_supported_kernel_block_sizes()
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    assert (
        issubclass(impl, SparseImpl) and issubclass(impl, parent.get_impl_cls()) and not impl.ours
    )
    assert issubclass(builder, SparseBuilder) and issubclass(builder, parent.get_builder_cls())
    # vLLM converts the class to its path and back.
    assert resolve_obj_by_qualname(".".join(backend.full_cls_name())) is backend
    # A page holds one tile of the kernels.
    sizes = [backend.get_preferred_block_size(size) for size in (16, 32, 64, 128)]
    assert sizes == [64, 64, 64, 128]
    # Without an artifact the parent's settings apply.
    plain = choose(path)
    assert plain.get_impl_cls() is parent.get_impl_cls()
    assert plain.get_preferred_block_size(16) == 16


def test_backend_skips_parent_with_unreadable_cache(choose, caplog):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    with caplog.at_level(logging.INFO, logger="vllm.headwise"):
        assert issubclass(
            choose("flex_attention.FlexAttentionBackend", headwise="c"), FlashAttentionBackend
        )
    assert "takes FLASH_ATTN for a parent, not FLEX_ATTENTION" in caplog.text


@pytest.mark.parametrize(
    ("parents", "artifact", "ours"),
    [
        ("ALWAYS", None, "ALWAYS"),
        ("ALWAYS", {}, "UNIFORM_BATCH"),
        ("UNIFORM_BATCH", {}, "UNIFORM_BATCH"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", {}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("ALWAYS", {"decode": CHOOSES}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("UNIFORM_BATCH", {"decode": CHOOSES}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("NEVER", {"decode": CHOOSES}, "NEVER"),
        ("ALWAYS", {"decode": CHOOSES | {"group": object()}}, "NEVER"),
        ("ALWAYS", {"decode": CHOOSES, "kv_cache": object()}, "NEVER"),
        ("ALWAYS", {"kv_cache": object()}, "NEVER"),
        ("ALWAYS", {"dense": True}, "UNIFORM_BATCH"),
        ("ALWAYS", {"drafts": 15}, "UNIFORM_BATCH"),
        ("ALWAYS", {"drafts": 16}, "NEVER"),
    ],
)
def test_cuda_graph_support_covers_replayable_steps(monkeypatch, parents, artifact, ours):
    from vllm.v1.attention.backend import AttentionCGSupport

    class Parent:
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport[parents]

    class Builder(SparseBuilder, Parent):  # type: ignore[misc]
        pass

    has = {"decode": None, "kv_cache": None, "dense": False, "drafts": None, **(artifact or {})}
    filter_decode = (
        None
        if has["decode"] is None
        else FilterDecode(OmniKV(**has["decode"]), requests=8, longest=512)
    )
    contents = SimpleNamespace(kv_cache=has["kv_cache"])
    at_work = SimpleNamespace(filter_decode=filter_decode, dense=has["dense"], artifact=contents)
    monkeypatch.setattr(
        "runtime.vllm.builder.engine_of", lambda _: None if artifact is None else at_work
    )
    drafts = (
        None if has["drafts"] is None else SimpleNamespace(num_speculative_tokens=has["drafts"])
    )
    config = SimpleNamespace(speculative_config=drafts)
    assert Builder.get_cudagraph_support(config, None) == AttentionCGSupport[ours]
