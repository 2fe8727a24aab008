"""Models that accelerate offloads: served as in memory, devices read from its hooks."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, CpuOffload, ModelHook, SequentialHook

import artifacts
from runtime import LoadedArtifact, apply_dense
from runtime.devices import execution_device
from tests.runtime.omnikv import LAYERS

STREAM = artifacts.Streaming(sinks=4, window=60, positions="cache")
CPU = torch.device("cpu")


def in_part(model, folder):
    places = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{number}": "cpu" for number in range(len(model.model.layers))}
    places |= {"model.layers.1": "disk", "lm_head": "cpu"}
    dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


OFFLOADS = {
    "to CPU": lambda model, _: cpu_offload(model, execution_device=CPU, offload_buffers=True),
    "to disk": lambda model, folder: disk_offload(model, str(folder), execution_device=CPU),
    "in part": in_part,
}


@pytest.mark.parametrize("section", ["patterns", "filters", "positions", "dense"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_model_equals_model_in_memory(
    offload, section, build, artifact_for, decoding, keeping, ids, tmp_path
):
    def served(model):
        applied = {
            "patterns": lambda: LoadedArtifact(artifact_for(model)).apply(model),
            "filters": lambda: decoding(model).apply(model),
            "positions": lambda: keeping(model, STREAM).apply(model),
            "dense": lambda: apply_dense(model),
        }[section]()
        with applied as handle:
            cache = handle.new_cache(offload="packed" if section == "filters" else "auto")
            options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
            options |= {"output_logits": True, "return_dict_in_generate": True}
            output = model.generate(ids(200), past_key_values=cache, **options)
            return torch.stack(output.logits), handle.stats()

    sizes = LAYERS if section == "filters" else {}
    expected = served(build(**sizes))
    model = build(**sizes)
    OFFLOADS[offload](model, tmp_path)
    assert any(weight.is_meta for weight in model.parameters())
    assert execution_device(model) == CPU
    torch.testing.assert_close(served(model), expected)


def test_execution_device_is_of_the_nearest_hook(build):
    model = build()
    attention = model.model.layers[1].self_attn
    assert execution_device(model) == execution_device(model, attention) == CPU
    model._hf_hook = CpuOffload(execution_device="cuda:1")
    assert execution_device(model) == execution_device(model, attention) == torch.device("cuda:1")
    attention.q_proj._hf_hook = SequentialHook(ModelHook(), AlignDevicesHook(execution_device=2))
    kind = torch.accelerator.current_accelerator() or torch.device("cuda")
    assert execution_device(model, attention) == torch.device(kind.type, 2)
    assert execution_device(model) == torch.device("cuda:1")


def test_new_cache_of_offloaded_layers_goes_to_the_bank(build, decoding):
    """Layers whose weights wait in CPU memory compute on a GPU, which their cache leaves."""
    model = build(**LAYERS)
    with decoding(model).apply(model) as handle:
        kinds = [type(layer).__name__ for layer in handle.new_cache().layers]
        assert "BankedLayer" not in kinds
        for layer in model.model.layers:
            layer.self_attn._hf_hook = AlignDevicesHook(execution_device="cuda:0")
        kinds = [type(layer).__name__ for layer in handle.new_cache().layers]
        assert kinds.count("BankedLayer") == 2
