"""Training: modules in training mode, and results that are differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

TRAINING = "the model is in training mode (use model.eval())"
GRADIENTS = "gradients are required (use torch.no_grad or inference_mode)"


def differentiated(*tensors: Tensor | None) -> bool:
    """True if what is computed from these tensors gets a gradient, now or on a second pass.

    Re-entrant checkpointing (torch.utils.checkpoint, and those of other libraries) computes a layer
    first inside the forward of an autograd.Function: without gradients there, though the result has
    them. Only there forward-mode gradients are off, too, outside inference mode.
    """
    if torch.is_grad_enabled():
        return any(x is not None and x.requires_grad for x in tensors)
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; its training flags come back, also after an error."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
