"""A model as the graph that OpenVINO GenAI serves, for openvino.py.

It is made once, into Headwise's cache folder: a stateful graph in fp16, whose attention OpenVINO's
pipelines replace by theirs, of decoders whose layers all attend to everything. optimum-intel
exports more, but not with the transformers that Headwise runs with.

Shapes: B batch, S new tokens, P past tokens, G KV heads, D head dim.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError
from profiling.models.cache import made_once
from profiling.models.loading import LoadedModel, load_model
from runtime.layers import attention_layers, full_layers, text_config

_INPUTS = ("input_ids", "attention_mask", "position_ids")
_FILE = "openvino_model.xml"
# The new and the past tokens of the example that is traced: both sizes stay free.
_NEW = 3
_PAST = 5


def exported(spec: str, *, weights: str, revision: str | None = None) -> Path:
    """The folder of a model's export, made once and kept in the cache folder.

    Args:
        spec, revision: as load_model has them.
        weights: the hash of its weights; other weights have another folder.

    Raises:
        HeadwiseError: a model whose layers slide; the cache folder cannot be written.
    """
    key = f"{weights[:24]}-{version('openvino')}-{version('transformers')}"

    def make(folder: Path) -> None:
        folder.mkdir()
        export(load_model(spec, dtype="float32", revision=revision), folder)

    return made_once("openvino", key, make, name=spec)


def export(loaded: LoadedModel, folder: Path) -> None:
    """Write a model's graph in fp32 and its config into an existing folder; weights become fp16.

    Raises:
        HeadwiseError: a model that this is not for.
    """
    import openvino

    model = loaded.model
    config = text_config(loaded.model)
    modules = attention_layers(model)
    if len(full_layers(modules)) != config.num_hidden_layers:
        raise HeadwiseError(
            f"cannot export {loaded.name}: not all of its layers attend to every token"
        )
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers
    past = [
        torch.zeros(1, heads, _PAST, dim, dtype=torch.float32, device="cpu")
        for _ in range(2 * layers)
    ]
    ids = torch.ones(1, _NEW, dtype=torch.long, device="cpu")
    seen = torch.ones(1, _PAST + _NEW, dtype=torch.long, device="cpu")
    example = (ids, seen, torch.arange(_PAST, _PAST + _NEW, device="cpu")[None], *past)
    with torch.no_grad():
        graph = openvino.convert_model(_Step(model).eval(), example_input=example)
    _name(graph, layers, (heads, dim))
    _make_stateful(graph, layers, (heads, dim))
    openvino.save_model(graph, folder / _FILE, compress_to_fp16=True)
    config.save_pretrained(folder)


def mark(folder: Path, ids: Sequence[int], target: Path) -> None:
    """Write an exported graph that computes logits at marked tokens alone.

    OpenVINO GenAI's `echo` takes the logits of all tokens of a prompt, which do not fit into memory
    where it is long. Of K ids the tokens k and K + k of the new graph are ids[k], and K + k is
    marked. After a marked token both have half of the probability of ids[k]; one more token has
    that of all other ids. After other tokens the logits are 0.
    """
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    def constant(value: Any) -> Any:
        return ops.constant(np.array(value))

    graph = openvino.Core().read_model(folder / _FILE)
    tokens = graph.input("input_ids")
    users = tokens.get_target_inputs()
    embedded = ops.gather(constant([*ids, *ids]), tokens, constant(0))
    for user in users:
        user.replace_source_output(embedded.output(0))
    result = graph.output("logits").get_node()
    head = result.input_value(0).get_node()
    if head.get_type_name() != "MatMul" or not head.get_attributes()["transpose_b"]:
        raise HeadwiseError(
            f"cannot measure {folder.name} by OpenVINO: its logits are not the product of hidden "
            "states and weights"
        )
    states, weight = head.input_values()
    last = constant([-1])
    flat = ops.reshape(tokens, last, False)
    at = ops.squeeze(ops.non_zero(ops.greater_equal(flat, constant(len(ids)))), constant(0))
    size = weight.get_partial_shape()[1].get_length()
    marked = ops.gather(ops.reshape(states, constant([-1, size]), False), at, constant(0))
    log_p = ops.log_softmax(ops.matmul(marked, weight, False, True), -1)
    own = ops.gather(log_p, constant(ids), constant(-1))
    known = ops.reduce_sum(ops.exp(own), last, keep_dims=True)
    others = ops.subtract(constant(np.float32(1)), known)
    rest = ops.log(ops.maximum(others, constant(np.float32(1e-7))))
    half = ops.subtract(own, constant(np.float32(np.log(2))))
    columns = ops.concat([half, half, rest], -1)
    width = constant([2 * len(ids) + 1])
    zeros = ops.broadcast(
        constant(np.float32(0)), ops.concat([ops.shape_of(flat, output_type="i64"), width], 0)
    )
    rows = ops.scatter_update(zeros, at, columns, constant(0))
    shape = ops.gather(ops.shape_of(states, output_type="i64"), constant([0, 1]), constant(0))
    logits = ops.reshape(rows, ops.concat([shape, width], 0), False)
    result.input(0).replace_source_output(logits.output(0))
    logits.output(0).get_tensor().set_names({"logits"})
    graph.validate_nodes_and_infer_types()
    openvino.save_model(graph, target / _FILE, compress_to_fp16=True)
    shutil.copy(folder / "config.json", target)


class _Held:
    """Keys and values of all layers (B, G, P, D) as transformers' cache; `new` are a step's."""

    is_compileable = False

    def __init__(self, past: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._past = past
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        before = self._past[layer]
        self.new[layer] = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        return self.new[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._past[layer][0].shape[2]


class _Step(nn.Module):
    """A model's forward with its cache as tensors, from which a graph can be traced."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits (B, S, V), then keys and values of each layer."""
        new = input_ids.shape[1]
        seen = attention_mask.shape[1]
        at = torch.arange(seen, device=input_ids.device)
        behind = at[None, :] <= at[seen - new :, None]
        mask = torch.where(behind, 0.0, torch.finfo(torch.float32).min)[None, None]
        held = _Held(list(zip(past[::2], past[1::2], strict=True)))
        logits = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=held,
            use_cache=True,
        ).logits
        return logits, *(tensor for layer in sorted(held.new) for tensor in held.new[layer])


def _states(layers: int) -> list[tuple[str, str]]:
    """Names of a graph's inputs and outputs of keys and values, as OpenVINO GenAI wants them."""
    return [
        (f"past_key_values.{layer}.{what}", f"present.{layer}.{what}")
        for layer in range(layers)
        for what in ("key", "value")
    ]


def _name(graph: Any, layers: int, of_head: tuple[int, int]) -> None:
    """Name inputs and outputs, and leave batch and lengths free."""
    import openvino

    heads, dim = of_head
    states = _states(layers)
    for port, name in zip(graph.inputs, [*_INPUTS, *(past for past, _ in states)], strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        shape = [-1, heads, -1, dim]
        if name in _INPUTS:
            shape = [-1, -1]
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(
        graph.outputs, ["logits", *(present for _, present in states)], strict=True
    ):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()


def _make_stateful(graph: Any, layers: int, of_head: tuple[int, int]) -> None:
    """Turn keys and values into states that begin empty, whose rows the input beam_idx picks."""
    import numpy as np
    import openvino
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    heads, dim = of_head
    states = _states(layers)
    beams = ops.parameter(
        name="beam_idx", dtype=openvino.Type.i32, shape=openvino.PartialShape([-1])
    )
    beams.output(0).get_tensor().add_names({"beam_idx"})
    graph.add_parameters([beams])
    for past, _ in states:
        port = graph.input(past)
        users = port.get_target_inputs()
        picked = ops.gather(port, beams, ops.constant(0))
        for user in users:
            user.replace_source_output(picked.output(0))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(states))
    batch = ops.gather(
        ops.shape_of(graph.input("input_ids"), output_type="i64"),
        ops.constant([0]),
        ops.constant(0),
    )
    rest = ops.constant(np.array([heads, 0, dim], dtype=np.int64))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            zero = ops.constant(0.0, dtype=node.get_output_element_type(0))
            node.set_arguments([ops.broadcast(zero, ops.concat([batch, rest], axis=0))])
    graph.validate_nodes_and_infer_types()
