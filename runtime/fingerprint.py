"""Fingerprint of a model, whatever dtype, folder or library version it was loaded with.

config_sha256 covers the fields of _CONFIG_FIELDS that the configuration sets, the head counts as
the model uses them, the rotary embedding and, where a layer slides, the kind of each layer. It
leaves out dtype, paths, cache switches, token ids and the number of positions: stretching the
positions makes no other model.

weights_sha256 covers every weight's name and shape and SAMPLES of its elements, evenly strided:
its time does not grow with the size of the weights. Weights are all parameters, buffers and
tensors in plain attributes, except for those that transformers' own modules compute from the
configuration (`_is_computed`). Elements are rounded to bfloat16 and magnitudes under 2**-14
(subnormal in float16) count as zero: a bfloat16 or float16 checkpoint has the same hash in any
dtype it is loaded in. A float32 checkpoint has the same hash in float32 and bfloat16, and may have
another as float16, which rounds twice. Integers of buffers are hashed as they are. Tied weights
count once. Only plain tensors are hashed, on any devices and also if accelerate offloads them. Of a
model that is quantized or has adapters only the configuration can be compared, with
check_weights=False. `profiling.models.identity` covers such models, too, in full.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError, ModelInfo
from artifacts.errors import one_line
from artifacts.store.hashing import canonical_json
from runtime.layers import heads_in, of_full_layers, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES = 64
# Where PEFT's modules keep the one that they wrap.
_INSIDE = {"base_layer", "original_module"}
# What other libraries call a weight, in any module.
_WEIGHTS = {"weight", "bias"}
# Attributes of every module.
_OF_MODULES = set(vars(nn.Module()))
# Positions of a model whose configuration sets no limit.
UNLIMITED = 2**31 - 1
_CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "hidden_activation",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_bias",
    "attention_chunk_size",
    "use_parallel_residual",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
# The compared fields, the most recognizable ones first. Not the name, which is free, nor
# max_positions, which may have been stretched.
_SHAPE = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")
_HASHES = ("config_sha256", "weights_sha256")
# What to do with a model that differs in a field.
_REMEDIES = {
    "vocab_size": "where tokens were added to the model, headwise gate --out writes an artifact "
    "for it",
    "config_sha256": "the artifact does not name the field that differs; where tokens were added "
    "to the model, headwise gate --out writes an artifact for it",
}


_log = logging.getLogger("headwise")


def fingerprint(model: PreTrainedModel, *, name: str, revision: str | None = None) -> ModelInfo:
    """Record a model for an artifact; weights that are not plain get no hash, with a warning.

    Raises:
        HeadwiseError: a weight is on the meta device, and not by accelerate's offloading.
    """
    info = config_info(text_config(model), type(model).__name__, name, revision)
    why = why_not_hashed(model)
    if why is not None:
        _log.warning("the weights get no fingerprint: %s", why)
        return info
    return info.model_copy(update={"weights_sha256": weights_sha256(model)})


def check(expected: ModelInfo, model: PreTrainedModel, *, weights: bool = True) -> None:
    """Raise HeadwiseError unless `model` is the expected one.

    Args:
        expected: what the artifact says of its model.
        model: the model to compare.
        weights: compare the weights, too, after all else.
    """
    info = config_info(text_config(model), type(model).__name__, expected.name)
    compare(expected, info)
    if weights and expected.weights_sha256 is not None:
        compare(expected, info.model_copy(update={"weights_sha256": weights_sha256(model)}))


def why_not_hashed(model: PreTrainedModel) -> str | None:
    """Reason why a model's weights are not hashed; None if all are plain floating-point tensors."""
    config = getattr(model.config, "quantization_config", None)
    if config is not None:
        if isinstance(config, dict):
            method = config.get("quant_method")
        else:
            method = config.quant_method
        return f"quantized weights ({getattr(method, 'value', method)})"
    for weight in _weights(model):
        if weight.is_parameter and not _INSIDE.isdisjoint(weight.name.split(".")):
            return f"an adapter around {weight.name}"
        tensor = weight.tensor
        if type(tensor.data) is not Tensor or tensor.layout is not torch.strided:
            return f"{weight.name} of type {type(tensor.data).__name__}"
        is_plain = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
        if (weight.is_parameter and not is_plain) or tensor.is_quantized:
            return f"{weight.name} of {tensor.dtype}"
    return None


class _Weight(NamedTuple):
    """A tensor that a model computes with, and the module that has it."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor
    is_parameter: bool


def _weights(model: nn.Module) -> Iterator[_Weight]:
    """All weights of a model by name; a tensor that is used twice counts once."""
    weights = []
    seen = set()
    for prefix, module in model.named_modules():
        members: list[tuple[str, Tensor | None, bool]] = [
            *((key, tensor, True) for key, tensor in module._parameters.items()),
            *((key, tensor, False) for key, tensor in module._buffers.items()),
            *((key, tensor, False) for key, tensor in plain_tensors(module)),
        ]
        for key, tensor, is_parameter in members:
            if tensor is None or id(tensor) in seen:
                continue
            if not is_parameter and _is_computed(module, key, tensor):
                continue
            seen.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            weights.append(_Weight(name, module, key, tensor, is_parameter))
    yield from sorted(weights, key=lambda weight: weight.name)


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a module's plain attributes by name, also in their lists and mappings."""
    for key, value in vars(module).items():
        if key not in _OF_MODULES:
            yield from _tensors_in(key, value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _tensors_in(f"{name}.{key}", entry)
    elif isinstance(value, list | tuple):
        for at, entry in enumerate(value):
            yield from _tensors_in(f"{name}.{at}", entry)


def _is_computed(module: nn.Module, key: str, tensor: Tensor) -> bool:
    """True for a tensor that transformers computes from the configuration, such as frequencies.

    Checkpoints do not have it: it is no persistent buffer, of a class of transformers.
    """
    if key in module._buffers and key not in module._non_persistent_buffers_set:
        return False
    of_transformers = type(module).__module__.startswith("transformers.models.")
    return of_transformers and not (key in _WEIGHTS and tensor.is_floating_point())


def compare(expected: ModelInfo, actual: ModelInfo) -> None:
    """Raise HeadwiseError naming the first field in which the models differ, with both values.

    None differs from nothing: an imported artifact does not know it of its model, or it was not
    read of this one.
    """
    for field, wanted, value in _compared(expected, actual):
        if wanted != value:
            remedy = f"; {_REMEDIES[field]}" if field in _REMEDIES else ""
            raise HeadwiseError(
                f"this artifact is for another model: {field} is {wanted} in the artifact "
                f"({one_line(expected.name)}), {value} in this model{remedy}"
            )


def _compared(expected: ModelInfo, actual: ModelInfo) -> Iterator[tuple[str, Any, Any]]:
    """Fields that both models have, with the values of both, in the order of comparison."""
    for field in _SHAPE:
        values = getattr(expected, field), getattr(actual, field)
        if None not in values:
            yield field, *values
    if expected.config is not None and actual.config is not None:
        for field in dict.fromkeys((*expected.config, *actual.config)):
            yield field, expected.config.get(field), actual.config.get(field)
    for field in _HASHES:
        values = getattr(expected, field), getattr(actual, field)
        if None not in values:
            yield field, *values


def weights_sha256(model: PreTrainedModel) -> str:
    """Hash every weight's name, shape and a sample of its elements: see the top of this file.

    Raises:
        HeadwiseError: a weight is not a plain tensor, or is on the meta device.
    """
    why = why_not_hashed(model)
    if why is not None:
        raise _refusal(why)
    digest = hashlib.sha256()
    samples: list[Tensor] = []
    for name, module, key, tensor, _ in _weights(model):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        if not tensor.numel():
            continue
        if not tensor.is_meta:
            samples.append(_sample(tensor))
            continue
        with brought_in(module):
            tensor = getattr(module, key, tensor)
            if tensor.is_meta:
                raise _refusal(f"{name} on the meta device")
            samples.append(_sample(tensor))
    for sample in _gathered(samples):
        digest.update(sample.numpy().astype(f"<i{sample.itemsize}").tobytes())
    return digest.hexdigest()


def brought_in(module: nn.Module) -> AbstractContextManager[None]:
    """Context in which a module's own weights are in memory, wherever accelerate keeps them."""
    from accelerate.utils import align_module_device

    aligned: AbstractContextManager[None] = align_module_device(module)
    return aligned


def _refusal(why: str) -> HeadwiseError:
    return HeadwiseError(
        f"check_weights=True compares plain floating-point weights, got {why}: use "
        "check_weights=False, which compares the configuration alone: other weights of the same "
        "shape then pass"
    )


def _sample(weight: Tensor) -> Tensor:
    """Evenly strided elements, (at most SAMPLES,): int16 bits of bfloat16, or int64 of integers."""
    weight = weight.detach()
    if weight.is_complex():
        weight = torch.view_as_real(weight)
    count = min(SAMPLES, weight.numel())
    at = torch.arange(count, device=weight.device) * (weight.numel() // count)
    if weight.dim():
        values = weight[torch.unravel_index(at, weight.shape)]
    else:
        values = weight.reshape(1)
    if not values.is_floating_point():
        return values.to(torch.int64)
    rounded = values.to(torch.bfloat16)
    rounded = torch.where(rounded.abs() < 2.0**-14, torch.zeros_like(rounded), rounded)
    return rounded.view(torch.int16)


def _gathered(samples: list[Tensor]) -> list[Tensor]:
    """The samples on the CPU, in order, by one copy for each device and dtype."""
    result = list(samples)
    for alike in dict.fromkeys((sample.device, sample.dtype) for sample in samples):
        members = [i for i, each in enumerate(samples) if (each.device, each.dtype) == alike]
        parts = torch.split(
            torch.cat([samples[i] for i in members]).cpu(), [samples[i].numel() for i in members]
        )
        for i, part in zip(members, parts, strict=True):
            result[i] = part
    return result


def config_info(
    config: Any, architecture: str, name: str, revision: str | None = None
) -> ModelInfo:
    """Record all but the weights, by a configuration and the name of the model's class."""
    num_heads, num_kv_heads = heads_in(config)
    shape: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": int(config.num_hidden_layers),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": int(of_full_layers(config, "head_dim") or config.hidden_size // num_heads),
        "rope": _plain(getattr(config, "rope_parameters", None) or {}),
    }
    fields = {field: of_full_layers(config, field) for field in _CONFIG_FIELDS}
    kinds = list(getattr(config, "layer_types", None) or ())
    # Some versions list the kinds of a model whose layers are all alike, some do not.
    fields["layer_types"] = kinds if set(kinds) - {"full_attention"} else None
    own = {field: value for field, value in fields.items() if value is not None}
    set_fields = {
        field: value for field, value in (shape | _plain(own)).items() if value is not None
    }
    return ModelInfo(
        name=name,
        revision=revision,
        **shape,
        config_sha256=hashlib.sha256(canonical_json(set_fields)).hexdigest(),
        config=json.loads(json.dumps(own)),
        weights_sha256=None,
        max_positions=int(getattr(config, "max_position_embeddings", None) or UNLIMITED),
    )


def _plain(value: Any) -> Any:
    """Plain JSON of a value.

    Numbers are of one sort, because 10000 and 10000.0 are one base; None in mappings is dropped.
    """
    if isinstance(value, dict):
        return {
            str(key): _plain(entry) for key, entry in sorted(value.items()) if entry is not None
        }
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value
