"""Size of a change of a layer's attention output in the residual stream.

Shapes: S tokens of a call, M hidden size, H query heads, E value dim.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from runtime.fingerprint import brought_in
from runtime.layers import attention_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ResidualStream:
    """Context manager that hooks a running model: size of the stream at each attention layer.

    The stream is what enters the block around an attention module.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = attention_layers(model)
        self._dtype = model.dtype
        names = {id(module): name for name, module in model.named_modules()}
        self._blocks = {
            layer: model.get_submodule(names[id(module)].rpartition(".")[0])
            for layer, module in self._modules.items()
        }
        self._sizes: dict[int, Tensor] = {}
        self._written: dict[int, ref[Tensor]] = {}
        self._gains: dict[int, Tensor] = {}
        self._grams: dict[int, Tensor] = {}
        self._hooks = ExitStack()

    def relative(self, layer: int, change: Tensor, at: int | slice = -1) -> Tensor:
        """Compute squared sizes of changes (..., H * E) relative to the stream's: (...).

        Args:
            layer: number of the layer.
            change: (..., H * E) changes of the layer's heads' outputs.
            at: the token, or tokens in the last dimension but one, that the changes are of; the
                newest by default. The size of a change once added is this times `gain` after the
                block.
        """
        written = _project(self._modules[layer], change, self._dtype)
        return written.square().sum(-1) / self._sizes[layer][at]

    def by_head(self, layer: int, change: Tensor, at: slice = slice(None)) -> Tensor:
        """Compute squared sizes of changes (H, C, S, E) of heads, relative to the stream's: (H, C).

        Their size once added is this times `gain` after the block.
        """
        heads, _, _, width = change.shape
        if layer not in self._grams:
            basis = torch.eye(heads * width, device=change.device, dtype=torch.float32)
            written = _project(self._modules[layer], basis, self._dtype).unflatten(
                0, (heads, width)
            )
            # Of the size of E x E a head, whatever the hidden size: x W W^T x.
            self._grams[layer] = written @ written.transpose(1, 2)
        moved = (
            torch.bmm(change.flatten(1, 2), self._grams[layer]).view_as(change).mul_(change).sum(-1)
        )
        return moved @ (1 / self._sizes[layer][at])

    def gain(self, layer: int) -> Tensor:
        """Factor on the squared size by a norm after attention, as in Gemma; else 1."""
        return self._gains[layer]

    def __enter__(self) -> Self:
        for layer, block in self._blocks.items():
            handles = [block.register_forward_pre_hook(self._enters(layer), with_kwargs=True)]
            handles.append(self._modules[layer].register_forward_hook(self._attends(layer)))
            handles += [
                child.register_forward_hook(self._scales(layer))
                for child in block.children()
                if child is not self._modules[layer]
            ]
            for handle in handles:
                self._hooks.callback(handle.remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.close()

    def _enters(self, layer: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if args:
                stream = args[0]
            else:
                stream = kwargs["hidden_states"]
            self._sizes[layer] = stream[0].detach().float().square().sum(-1).clamp_min(1e-30)

        return hook

    def _attends(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # Not the tensor itself: the outputs of all layers together are larger than anything
            # else that is held.
            if isinstance(output, tuple):
                written = output[0]
            else:
                written = output
            self._written[layer] = ref(written)
            self._gains[layer] = torch.ones_like(self._sizes[layer][-1])

        return hook

    def _scales(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # Other norms of a block take sums, which are new tensors.
            if layer in self._written:
                written = self._written[layer]()
            else:
                written = None
            if args and written is not None and args[0] is written and isinstance(output, Tensor):
                self._gains[layer] = _size(output) / _size(written).clamp_min(1e-30)

        return hook


def _size(states: Tensor) -> Tensor:
    """The squared size of the newest token's states (1, S, M)."""
    return states[0, -1].detach().float().square().sum()


def _project(module: nn.Module, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply an attention module's output projection to a change of its heads' outputs.

    Args:
        module: the attention module.
        change: (..., H * E) changes of its heads' outputs.
        dtype: of the model's activations, for a projection that is not a plain linear map.
    """
    for child in reversed(list(module.children())):
        if not any(_width(part) == change.shape[-1] for part in child.modules()):
            continue
        with brought_in(child):
            weight: Any = getattr(child, "weight", None)
            if type(child).forward is nn.Linear.forward:
                return linear(change.to(weight.dtype), weight).float()
            if type(child).__name__ == "Conv1D":
                return (change.to(weight.dtype) @ weight).float()
        # Quantized, or wrapped around a projection: its output for zeros is its bias.
        change = change.to(dtype)
        return (child(change) - child(torch.zeros_like(change))).float()
    return change


def _width(part: Any) -> int | None:
    """The width of a linear map's input; None of other modules."""
    if isinstance(part, nn.Linear):
        return part.in_features
    if type(part).__name__ == "Conv1D":
        return int(part.weight.shape[0])
    return None
