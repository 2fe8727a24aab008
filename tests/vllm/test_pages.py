"""The CPU backend's own cache, in every layout that it has on this processor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from runtime.vllm.pages import packed


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "dim"), [(32, 64), (128, 128), (128, 80), (64, 256)])
def test_keys_and_values_come_back(isa: str, dtype: torch.dtype, size: int, dim: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    if isa == "amx" and not (dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()):
        pytest.skip("AMX is for bfloat16, on processors that have it")
    if isa == "vec" and dim % 32:
        pytest.skip("the backend takes vec16 for this head dim")
    impl = object.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", "auto"
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    length, heads = 2 * size + 7, 3
    pages = torch.tensor([4, 1, 2], dtype=torch.int32)
    key, value = torch.randn(2, length, heads, dim).to(dtype)
    cache = torch.zeros(5, heads, size, 2 * dim, dtype=dtype)
    at = torch.arange(length)
    impl.do_kv_cache_update(layer, key, value, cache, pages[at // size].long() * size + at % size)
    keys = packed(impl, layer, cache)(cache, pages, length)
    assert torch.equal(keys.k[0].transpose(0, 1), key) and torch.equal(keys.v[0].transpose(0, 1), value)
