"""What a change of a layer's attention output comes to in the residual stream.

Shapes: S tokens of a call, M hidden size, H query heads, E value dim, n changes.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.nn.functional import linear

from runtime.layers import attention_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ResidualStream:
    """Watches a model while it runs, as a context manager: how large the stream is that each attention layer adds to.

    The stream is what enters the block around an attention module, at the newest token. Where a block scales the
    attention's output before it adds it, as Gemma's do, sizes are those before: right within a layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = attention_layers(model)
        names = {id(module): name for name, module in model.named_modules()}
        self._blocks = {
            layer: model.get_submodule(names[id(module)].rpartition(".")[0]) for layer, module in self._modules.items()
        }
        self._sizes: dict[int, Tensor] = {}
        self._hooks = ExitStack()

    def relative(self, layer: int, change: Tensor) -> Tensor:
        """Squared size of changes (n, H * E) of an attention output once added to the stream, by the stream's: (n)."""
        written = _project(self._modules[layer], change)
        return written.square().sum(-1) / self._sizes[layer]

    def __enter__(self) -> Self:
        for layer, block in self._blocks.items():
            handle = block.register_forward_pre_hook(self._watch(layer), with_kwargs=True)
            self._hooks.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _watch(self, layer: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream = args[0] if args else kwargs["hidden_states"]
            self._sizes[layer] = stream[0, -1].float().square().sum()

        return hook


def _project(module: nn.Module, change: Tensor) -> Tensor:
    """What an attention module makes of a change of its heads' outputs: its last linear map that takes them."""
    for child in reversed(list(module.children())):
        weight = getattr(child, "weight", None)
        if weight is None or weight.dim() != 2:
            continue
        if isinstance(child, nn.Linear) and weight.shape[1] == change.shape[1]:
            return linear(change.to(weight.dtype), weight).float()
        if type(child).__name__ == "Conv1D" and weight.shape[0] == change.shape[1]:
            return (change.to(weight.dtype) @ weight).float()
    return change
