"""Recall of patterns: the attention mass that they keep of a model's own heads."""

from __future__ import annotations

import pytest
import torch

from artifacts import Artifact, AShape, Imported, Prefill
from profiling.inside.head_fidelity import recall
from profiling.prompts.prompt import Prompt
from runtime.fingerprint import fingerprint
from runtime.plans import layer_plans
from tests.runtime.tiny import tiny_model


def test_recall_is_of_patterns_alone() -> None:
    model = tiny_model("Llama")
    ids = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = Prompt(tuple(ids), None)
    sizes, source = model.config, Imported(format="minference", file="best.json", sha256="0" * 64, scores="recall")

    def kept(window: int) -> dict[str, float]:
        rows = (("a",) * sizes.num_attention_heads,) * sizes.num_hidden_layers
        prefill = Prefill(dense_below=64, dense_tail=0, layers=rows, imported=source)
        patterns = {"a": AShape(sink=64, window=window)}
        info = fingerprint(model, name="tiny")
        made = Artifact(model=info, search=None, patterns=patterns, prefill=prefill)
        return recall(model, prompt, {"dense": {}, "m": layer_plans(made)})

    few, all_of_it = kept(64), kept(256)
    assert list(few) == list(all_of_it) == ["m"] and 0.3 < few["m"] < 0.99
    assert all_of_it["m"] == pytest.approx(1, abs=1e-5)
    assert recall(model, prompt, {"dense": {}}) == {}
