"""What the plugin writes into vLLM's own objects, since vLLM has no other way."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import artifacts
from runtime.caches.snapkv import SnapKV
from runtime.vllm.builder import SparseBuilder
from runtime.vllm.engine import Engine, ServedLayer
from runtime.vllm.policy_host import PagedPolicy
from tests.runtime.vllm.conftest import G, ParentsBuilder, step

SNAPKV = PagedPolicy((SnapKV.paging(artifacts.SnapKV(budget=40, window=8)),) * G)


class Parents(ParentsBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any) -> None:
        pass


class Builder(SparseBuilder, Parents):  # type: ignore[misc]
    parents = Parents


@pytest.fixture
def modules(monkeypatch):
    """Return attention modules by name, which a module in place of vllm.config hands out."""
    modules: dict[str, Any] = {}

    def get_layers(config: Any, kind: Any, names: Any = None) -> dict[str, Any]:
        return {name: each for name, each in modules.items() if names is None or name in names}

    contents = {
        "vllm.config": {"get_layers_from_vllm_config": get_layers},
        "vllm.model_executor.layers.attention": {"Attention": object},
    }
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", *contents):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return modules


@pytest.mark.parametrize("selects", [True, False])
def test_builder_asks_for_lengths_of_prompts_only_to_select(selects, modules, engine, monkeypatch):
    """vLLM passes them to models with a window over their replies, which the parent must not see.

    A second engine of a process has a configuration of its own, so that nothing is to be undone.
    """
    policy = SNAPKV if selects else None
    layer = ServedLayer(number=0, policy=policy, owned=True)
    at_work = engine.at_work
    vars(at_work).update(
        served_layer=lambda module: layer, needs_prompts=selects, log=lambda modules: None
    )
    monkeypatch.setattr("runtime.vllm.builder.engine_of", lambda config: at_work)
    modules["layers.0"] = object()
    arch = SimpleNamespace(rswa_window=None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model_arch_config=arch), speculative_config=None
    )
    builder = Builder(None, ["layers.0"], config)
    assert arch.rswa_window == (at_work.longest if selects else None)
    common = step((30, 200))
    if selects:
        common.rswa_prefix_lens = torch.tensor([190, 0, 0], dtype=torch.int32)
    metadata = builder.build(0, common)
    assert metadata.common.rswa_prefix_lens is None
    chunks = [(chunk.q_len, chunk.prompt) for chunk in metadata.headwise.requests]
    assert chunks == ([(20, 190), (10, 190)] if selects else [(30, 0)])


def test_layer_that_drops_tokens_answers_with_own_specification(monkeypatch):
    specs: Any = ModuleType("runtime.vllm.specs")
    specs.paged_spec = lambda full, pagings, longest: (full, pagings, longest)
    monkeypatch.setitem(sys.modules, "runtime.vllm.specs", specs)

    class Attention:
        impl = SimpleNamespace(sinks=None)

        def get_kv_cache_spec(self, config: Any) -> str:
            return f"full, {config}"

    module, other = Attention(), Attention()
    at_work: Any = object.__new__(Engine)
    at_work.longest = 512
    at_work._set_spec(module, ServedLayer(number=0, policy=SNAPKV, owned=True), SNAPKV)
    assert module.get_kv_cache_spec("config") == ("full, config", SNAPKV.every, 512)
    # No other layer of the class answers so.
    assert other.get_kv_cache_spec("config") == "full, config"


def test_layer_with_attention_sinks_cannot_select(monkeypatch):
    module = SimpleNamespace(impl=SimpleNamespace(sinks=torch.zeros(4)))
    at_work: Any = object.__new__(Engine)
    at_work.longest = 512
    with pytest.raises(artifacts.HeadwiseError, match=r"layers\[3\] .* uses attention sinks"):
        at_work._set_spec(module, ServedLayer(number=3, policy=SNAPKV, owned=True), SNAPKV)
