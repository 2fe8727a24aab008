"""Models that their users have loaded: quantised, fine-tuned or patched ones, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from artifacts import HeadwiseError
from profiling.models.loading import LoadedModel, check_attention, commit_of
from runtime.attention.applied import layer_of
from runtime.autocast import autocast_on
from runtime.devices import execution_device
from runtime.layers import attention_layers, inner_model
from runtime.training import in_evaluation_mode


@contextmanager
def preloaded_model(
    model: Any, tokenizer: Any, *, name: str | None = None, revision: str | None = None
) -> Iterator[LoadedModel]:
    """Yield a model in evaluation mode; its training flags come back, also after an error.

    Within torch.inference_mode the block runs in torch.no_grad instead: a search takes gradients.

    Args:
        model: a causal language model of transformers, where it is to run; also in a PeftModel.
        tokenizer: its tokenizer.
        name: for artifacts and reports; None for the model's own.
        revision: on the hub; None for the one that it was loaded from.

    Raises:
        HeadwiseError: it is no such model, its attention cannot be reached, or an artifact is
            applied to it, or torch.autocast is on.
    """
    whole = model
    model = inner_model(model)
    if model is not whole and model is whole.base_model:
        raise HeadwiseError(
            f"{type(whole).__name__} puts learned prompts before the model, which no command "
            "measures: pass its base_model"
        )
    layers = attention_layers(model)
    if not callable(tokenizer):
        raise HeadwiseError(f"tokenizer must be the model's, got {type(tokenizer).__name__}")
    if name is None:
        name = _own_name(model)
    if any(layer_of(module) is not None for module in layers.values()):
        raise HeadwiseError(
            f"{name} has an artifact or apply_dense applied: headwise.undo(model) takes it off"
        )
    if autocast_on(execution_device(model)):
        raise HeadwiseError(
            f"{name} cannot be measured under torch.autocast: leave autocast and load the model in "
            f"the dtype that it runs in, such as model.to(torch.bfloat16)"
        )
    with in_evaluation_mode(whole), ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        check_attention(model, name)
        yield LoadedModel(model, tokenizer, name, revision or commit_of(model))


def _own_name(model: Any) -> str:
    """The name that a model was loaded by, without folders; else its class."""
    name = model.name_or_path
    if not name:
        return type(model).__name__
    if os.path.exists(name):
        return Path(os.path.realpath(name)).name
    return name
