"""A forward of a few tokens, which shows how a model uses the keys that it caches.

Shapes: B batch, G KV heads, D head dim.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from runtime.caches.policy import Full
from runtime.devices import execution_device
from runtime.layers import attention_layers, layer_kinds, text_config
from runtime.lazy import MisfitError, UnreadableError
from runtime.training import in_evaluation_mode

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

# Positions of the same tokens, and how many tokens.
POSITIONS = (3, 100)
_TOKENS = 4


@dataclass(frozen=True)
class Rehearsal:
    """Result of the forward. Each token is a sequence of length one and sees only itself.

    Attributes:
        keys: (2 x tokens, G, 1, D) of each layer: of the tokens at the first position, then of the
            same at the second.
        failure: reason why the forward failed.
        misfit: True if it failed because no cache under policies can serve the model.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)
    failure: str | None = None
    misfit: bool = False


# By model: with an artifact applied and caches under policies, and with transformers' own cache.
_applied: weakref.WeakKeyDictionary[nn.Module, Rehearsal] = weakref.WeakKeyDictionary()
_plain: weakref.WeakKeyDictionary[nn.Module, Rehearsal] = weakref.WeakKeyDictionary()


def rehearsed(model: nn.Module) -> Rehearsal | None:
    """Result of rehearse(); None before it, and if the forward failed for another reason."""
    result = _applied.get(model)
    if result is None or (result.failure is not None and not result.misfit):
        return None
    return result


def rehearse(model: PreTrainedModel) -> None:
    """Run the forward of a model with an artifact applied, on caches under policies."""
    from transformers import DynamicCache

    from runtime.caches.layer import KVHeads, PolicyLayer

    modules = attention_layers(model)
    kinds = layer_kinds(modules)
    served = [number for number, kind in kinds.items() if kind != "other"]
    cache = DynamicCache(config=text_config(model))
    for number in served:
        sliding = kinds[number] == "sliding"
        cache.layers[number] = PolicyLayer([KVHeads(None, Full)], sliding=sliding)
    try:
        _forward(model, cache)
    except UnreadableError as error:
        number = cache.layers.index(error.layer)
        reason = (
            f"layer {number} ({type(modules[number]).__name__}) computes with keys or values "
            f"between its cache and attention: the kv_cache section cannot serve it"
        )
        _applied[model] = Rehearsal(failure=reason, misfit=True)
    except MisfitError as error:
        _applied[model] = Rehearsal(failure=str(error), misfit=True)
    except HeadwiseError as error:
        # Of this call, such as attention weights that were asked for.
        _applied[model] = Rehearsal(failure=str(error))
    except Exception as error:
        _applied[model] = _failed(model, error)
    else:
        keys = {number: cache.layers[number].policies[0].keys[:, :, :1] for number in served}
        _applied[model] = Rehearsal(keys)


def keys_at_two_positions(model: PreTrainedModel) -> Rehearsal:
    """Result of rehearse(); before any artifact was applied, the keys of transformers' cache."""
    from transformers import DynamicCache

    result = rehearsed(model) or _plain.get(model)
    if result is None:
        cache = DynamicCache(config=text_config(model))
        try:
            _forward(model, cache)
        except Exception as error:
            return _failed(model, error)
        keys = {number: getattr(layer, "keys", None) for number, layer in enumerate(cache.layers)}
        result = Rehearsal({number: each for number, each in keys.items() if each is not None})
        _plain[model] = result
    return result


def _failed(model: PreTrainedModel, error: Exception) -> Rehearsal:
    """Result of a forward that failed: the cache is the reason if it works without one."""
    reason = shorten(one_line(str(error)), 160)[1:-1]
    try:
        _forward(model, None)
    except Exception:
        # The model needs other inputs than tokens, or is not ready to be called.
        return Rehearsal(failure=f"a forward of a few tokens failed: {reason}")
    return Rehearsal(
        failure=f"{type(model).__name__} cannot be called with such a cache: {reason}", misfit=True
    )


def _forward(model: PreTrainedModel, cache: Cache | None) -> None:
    device = execution_device(model)
    if device.type == "meta":
        raise RuntimeError("the model is on the meta device")
    ids = torch.arange(1, _TOKENS + 1, device=device).repeat(2)[:, None]
    more: dict[str, Any] = {}
    if "position_ids" in inspect.signature(model.base_model.forward).parameters:
        positions = torch.tensor(POSITIONS, dtype=torch.long, device=device)
        positions = positions.repeat_interleave(_TOKENS)
        more["position_ids"] = positions[:, None]
    if cache is not None:
        more["past_key_values"] = cache
    with torch.no_grad(), in_evaluation_mode(model):
        model.base_model(input_ids=ids, use_cache=cache is not None, **more)
