"""Times of layers are of the attention that serving computes."""

import pytest
import torch

from kernels.patterns import LayerPlan, make
from profiling.models.loading import LoadedModel
from profiling.speed.layer_times import ANCHOR, SDPA, PlansToTime, time_layers
from runtime.layers import attention_layers, full_layers
from tests.runtime.tiny import tiny_model


@pytest.mark.parametrize(
    ("family", "by_torch"),
    [("Llama", True), ("Granite", True), ("Gemma2", False), ("GptOss", False)],
)
def test_time_layers_runs_attention_with_scale_softcap_and_sinks(family, by_torch, monkeypatch):
    """Every timed run of a dense layer has one output, and the pass continues with it."""
    model = tiny_model(family)
    layers = full_layers(attention_layers(model))
    ids = torch.randint(3, 97, (1, 200), generator=torch.Generator().manual_seed(0))
    logits = []
    model.register_forward_hook(lambda module, args, output: logits.append(output.logits[0, -1]))
    outputs = []

    def time_calls(runs, **_):
        outputs.append({name: run() for name, run in runs.items()})
        return {name: [1.0] for name in runs}

    monkeypatch.setattr("profiling.speed.layer_times.time_calls", time_calls)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    plan = LayerPlan([make("dense")] * heads[0], heads[1])
    request = PlansToTime(tokens=200, plans={"dense": dict.fromkeys(layers, plan)}, sdpa=True)
    with torch.no_grad():
        model(ids)
        loaded = LoadedModel(model, None, "tiny", None)
        time_layers(loaded, ids[0].tolist(), [request], layers, backend="reference")
    assert len(outputs) == len(layers) and all((SDPA in runs) == by_torch for runs in outputs)
    close = {"atol": 2e-4, "rtol": 1e-3}
    for runs in outputs:
        for out in runs.values():
            torch.testing.assert_close(out, runs[ANCHOR], **close)
    torch.testing.assert_close(logits[1], logits[0], **close)
