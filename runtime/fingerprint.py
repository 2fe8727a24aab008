"""Says which model an artifact belongs to, whatever dtype, folder or library version it was loaded with.

config_sha256 covers the fields of _CONFIG_FIELDS that the configuration sets, the head counts as the model
uses them, the rotary embedding and, where a layer slides, the kind of each layer. It leaves out dtype, paths,
cache switches, token ids and the number of positions: stretching the positions makes no other model.

weights_sha256 covers every parameter's name and shape and SAMPLES of its elements, evenly strided: its time
does not grow with the size of the weights. Elements are rounded to bfloat16 and magnitudes under 2**-14
(subnormal in float16) count as zero: a bfloat16 or float16 checkpoint gives one hash however it is loaded.
A float32 checkpoint gives one for float32 and bfloat16, and may give another as float16, which rounds twice.
Tied weights count once. Adapters that stand beside the weights do not count; a quantised model is told by the numbers
that it stores, so it is another model than the one that it was made of. Where an artifact is for the latter, that is
said, and what else can be compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from artifacts import HeadwiseError, ModelInfo
from artifacts.hashing import canonical_json
from runtime.layers import heads_in, of_full_layers, text_config
from runtime.sharding import is_sharded, local_elements

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES = 64
# Where PEFT's modules keep the one that they stand around.
_INSIDE = ("base_layer", "original_module")
# Several numbers a byte, or fewer bits than it has: torch takes no element of these.
_PACKED = {getattr(torch, name) for name in dir(torch) if re.fullmatch(r"u?int[1-7]|float4_\w+", name)}
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
# The fields that tell two models apart, from what a person recognises first to the hashes. Not the name, that
# a person gives, nor max_positions, that may have been stretched.
_COMPARED = (
    "architecture",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope",
    "config_sha256",
    "weights_sha256",
)


def fingerprint(model: PreTrainedModel, *, name: str, revision: str | None = None) -> ModelInfo:
    """What the artifact records of a model.

    Raises:
        HeadwiseError: a weight is nowhere to be read.
    """
    found = config_info(text_config(model), type(model).__name__, name, revision)
    return found.model_copy(update={"weights_sha256": weights_sha256(model)})


def check(expected: ModelInfo, model: PreTrainedModel, *, weights: bool = True) -> None:
    """Raise HeadwiseError unless `model` is the expected one; weights are read last, and if asked for."""
    compare(expected, config_info(text_config(model), type(model).__name__, expected.name))
    if not weights or expected.weights_sha256 is None:
        return
    found = fingerprint(model, name=expected.name)
    if found.weights_sha256 != expected.weights_sha256 and (how := _quantised(model)) is not None:
        raise HeadwiseError(
            f"this model's weights are quantised ({how}), and the artifact ({expected.name}) is for others: the "
            "original ones are gone. The configuration is the same: apply with check_weights=False to go by that "
            "alone, or search this model"
        )
    compare(expected, found)


def compare(expected: ModelInfo, actual: ModelInfo) -> None:
    """Raise HeadwiseError naming the first field in which the models differ, with both values.

    None differs from nothing: an imported artifact does not know it of its model, or it was not read of this one.
    """
    for field in _COMPARED:
        wanted, found = getattr(expected, field), getattr(actual, field)
        if None not in (wanted, found) and wanted != found:
            raise HeadwiseError(
                f"this artifact is for another model: {field} is {wanted} in the artifact ({expected.name}), "
                f"{found} in this model"
            )


def weights_sha256(model: PreTrainedModel) -> str:
    """Hash of every parameter's name, shape and a sample of its elements, see the top of this file."""
    digest = hashlib.sha256()
    samples: list[Tensor] = []
    meshes: list[Any] = []
    homes = {
        id(weight): (module, key) for module in model.modules() for key, weight in module.named_parameters("", False)
    }
    for name, weight in sorted(_base_weights(model), key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        if not weight.numel():
            continue
        home = homes.get(id(weight)) if weight.is_meta else None
        with brought_in(home[0]) if home else nullcontext():
            there = getattr(*home) if home else weight
            if there.is_meta:
                raise HeadwiseError(
                    f"the weights cannot be fingerprinted: {name} is nowhere to be read; "
                    "load the whole model, or apply with check_weights=False"
                )
            samples.append(_sample(there.detach()))
            meshes.append(getattr(weight, "device_mesh", None) if is_sharded(weight) else None)
    for sample in _gathered(samples, meshes):
        digest.update(sample.numpy().astype("<i2").tobytes())
    return digest.hexdigest()


def brought_in(module: nn.Module) -> AbstractContextManager[None]:
    """While it lasts, the module's own weights are there, also where accelerate keeps them in memory or on disk."""
    from accelerate.utils import align_module_device

    aligned: AbstractContextManager[None] = align_module_device(module)
    return aligned


def _base_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each parameter without adapters; what a quantised one is stored as, part by part.

    Adapters of PEFT stand around what was there before, which each keeps as `base_layer` or, where a module is trained
    as a whole, as `original_module`. They are known by that, not by their names.

    Raises:
        HeadwiseError: an adapter is merged into the weights, which are then others.
    """
    outside: set[int] = set()
    for name, module in model.named_modules():
        if getattr(module, "merged", False) is True and isinstance(getattr(module, "base_layer", None), nn.Module):
            raise HeadwiseError(
                f"the weights cannot be fingerprinted: an adapter is merged into {name}: unmerge it, or apply with "
                "check_weights=False"
            )
        for inner in _INSIDE:
            if isinstance(base := getattr(module, inner, None), nn.Module):
                outside |= {id(weight) for weight in module.parameters()} - {id(weight) for weight in base.parameters()}
    for name, weight in model.named_parameters():
        if id(weight) not in outside:
            plain = ".".join(part for part in name.split(".") if part not in _INSIDE)
            yield from _parts(plain, weight)


def _parts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those that one of another library's types is made of (torchao's quantised ones)."""
    inside: Any = weight.data
    if type(inside) is Tensor or is_sharded(weight) or not is_traceable_wrapper_subclass(inside):
        yield name, weight
        return
    for part in inside.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(inside, part))


def _quantised(model: PreTrainedModel) -> str | None:
    """What quantised a model, or the first weight that is stored in few bits; None for one that is not quantised."""
    config = getattr(model.config, "quantization_config", None)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
        return str(getattr(method, "value", method))
    for name, weight in _base_weights(model):
        if weight.dtype.itemsize == 1 or not weight.dtype.is_floating_point:
            return f"{name} is {weight.dtype}"
    return None


def _sample(weight: Tensor) -> Tensor:
    count = min(SAMPLES, weight.numel())
    at = torch.arange(count, device=weight.device) * (weight.numel() // count)
    if is_sharded(weight):
        # What others answer for stays zero until all are added up.
        own, which = local_elements(weight, torch.unravel_index(at, weight.shape))
        values = torch.zeros(count, dtype=own.dtype, device=own.device)
        values[which] = own
    else:
        if weight.dtype in _PACKED:
            weight = weight.view(torch.uint8)
        values = weight[torch.unravel_index(at, weight.shape)] if weight.dim() else weight.reshape(1)
    rounded = values.to(torch.bfloat16)
    return torch.where(rounded.abs() < 2.0**-14, torch.zeros_like(rounded), rounded).view(torch.int16)


def _gathered(samples: list[Tensor], meshes: list[Any]) -> list[Tensor]:
    """The samples on the CPU, in order, those of sharded parameters put together from all processes.

    One copy for each device, one exchange for each mesh.
    """
    result = list(samples)
    homes = [(sample.device, mesh) for sample, mesh in zip(samples, meshes, strict=True)]
    for device, mesh in dict.fromkeys(homes):
        members = [i for i, home in enumerate(homes) if home == (device, mesh)]
        joined = torch.cat([samples[i] for i in members])
        if mesh is not None:
            joined = joined.to(torch.int32)
            for axis in range(mesh.ndim):
                torch.distributed.all_reduce(joined, group=mesh.get_group(axis))
        parts = torch.split(joined.to("cpu", torch.int16), [samples[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            result[i] = part
    return result


def config_info(config: Any, architecture: str, name: str, revision: str | None = None) -> ModelInfo:
    """All but the weights, by the configuration of a model's language part and the name of its class."""
    num_heads, num_kv_heads = heads_in(config)
    shape: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": int(config.num_hidden_layers),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": int(of_full_layers(config, "head_dim") or config.hidden_size // num_heads),
        "rope": _plain(getattr(config, "rope_parameters", None) or {}),
    }
    covered = shape | {field: _plain(of_full_layers(config, field)) for field in _CONFIG_FIELDS}
    kinds = list(getattr(config, "layer_types", None) or ())
    # Some versions list the kinds of a model whose layers are all alike, some do not.
    covered["layer_types"] = kinds if set(kinds) - {"full_attention"} else None
    set_fields = {field: value for field, value in covered.items() if value is not None}
    return ModelInfo(
        name=name,
        revision=revision,
        **shape,
        config_sha256=hashlib.sha256(canonical_json(set_fields)).hexdigest(),
        weights_sha256=None,
        max_positions=int(getattr(config, "max_position_embeddings", None) or UNLIMITED),
    )


def _plain(value: Any) -> Any:
    """Plain JSON: one sort of number, because 10000 and 10000.0 are one base; None in mappings dropped."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in sorted(value.items()) if entry is not None}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value
