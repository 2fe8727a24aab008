"""Devices that compute, also where accelerate keeps the weights elsewhere (offloading)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from runtime.layers import surrounding


def execution_device(model: Any, module: nn.Module | None = None) -> torch.device:
    """Device on which a module of a model computes; without one, on which the model takes tokens.

    Weights of an offloaded module are on the meta device between its calls, or on the CPU: the
    device is that of accelerate's hook. Without hooks it is that of the module's first weight.

    Args:
        model: a model.
        module: a module of it; None for its embeddings.
    """
    if module is None:
        module = model.get_input_embeddings()
    assert module is not None
    around = reversed(surrounding(model, [module])[module])
    outer = [each for reference in around if (each := reference()) is not None]
    for each in (*module.modules(), *outer):
        for device in _hook_devices(each):
            return device
    weight = next(module.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


def _hook_devices(module: nn.Module) -> Iterator[torch.device]:
    """Devices of the hooks of a module."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if isinstance(device, int):
            # accelerate numbers the devices of the accelerator.
            current = torch.accelerator.current_accelerator()
            yield torch.device("cuda" if current is None else current.type, device)
        elif device is not None:
            yield torch.device(device)
