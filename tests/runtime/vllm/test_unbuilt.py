"""Kernels that cannot be built: vLLM's own attention serves, or the engine stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.reference import Attention
from tests.runtime.vllm.conftest import CLOSE, LAYER, D, H, Parent, by_selection, serve, step
from tests.runtime.vllm.test_steps import (
    filter_layer,
    layer_of_patterns,
    layer_that_selects,
    layer_that_streams,
)

REFERENCE = Attention.run


@pytest.fixture
def unbuilt(unbuildable, monkeypatch):
    """Return the calls of vLLM's own attention, where no kernel can be built."""
    calls = []
    forward = Parent.forward

    def counted(self: Any, *args: Any) -> Tensor:
        calls.append(args)
        with monkeypatch.context() as patch:
            patch.setattr(Attention, "run", REFERENCE)
            return forward(self, *args)

    monkeypatch.setattr(Parent, "forward", counted)
    return calls


UNBUILT = "no fast kernel: .*cpu: its kernel failed to build: RuntimeError: no assembler"


@pytest.mark.parametrize("requests", [((200, 200), (1, 90)), ((1, 300), (1, 20)), ((30, 300),)])
def test_layer_whose_kernels_do_not_build_is_left_to_vllm(engine, unbuilt, requests, caplog):
    if engine.ours:
        with pytest.raises(HeadwiseError, match=f"vLLM's own attention cannot .*: {UNBUILT}"):
            serve(engine, step(*requests))
        assert not unbuilt
        return
    outs, inputs, _ = serve(engine, step(*requests))
    for out, each in zip(outs, inputs, strict=True):
        torch.testing.assert_close(out, by_selection(each), **CLOSE)
    assert len(unbuilt) == 1
    fallbacks = engine.at_work.counters.report()["fallbacks"]
    assert fallbacks["vLLM's own attention serves"] == 1
    assert "its kernel failed to build" in caplog.text


@pytest.mark.parametrize("layer", [layer_of_patterns, layer_that_streams, layer_that_selects])
def test_kernels_that_do_not_build_show_in_profiling_run(engine, unbuilt, layer, caplog):
    layer(engine)
    engine.at_work.longest = 1024
    query = torch.randn(256, H, D)
    arguments = LAYER, query, None, None, torch.empty(0), None, torch.empty_like(query)
    if not engine.ours and engine.at_work.layer.policy is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Parent, "forward", lambda *args: args[-1].fill_(0))
            assert not engine.impl.forward(*arguments).any()
        assert "its kernel failed to build" in caplog.text
    else:
        with pytest.raises(HeadwiseError, match=UNBUILT):
            engine.impl.forward(*arguments)


def test_processes_that_select_together_stop_without_kernels(engine, unbuilt):
    filter_layer(engine, requests=1)
    engine.at_work.size = 2
    with pytest.raises(HeadwiseError, match=UNBUILT):
        serve(engine, step((1, 1024)))
    assert not unbuilt
