"""What `apply(model, low_memory=True)` puts on a model, and takes off again: see docs/runtime.md, "A million tokens".

Blocks of a decoder are found by the attention in them, without a table of model names: what stands beside it in its
block, and beside the list of blocks, and takes one tensor of hidden states, is run by tiles if it treats each token by
itself. Attention modules are run by tiles around their attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from runtime.low_memory.attention import TiledAttention
from runtime.low_memory.tiles import Logits, PositionWise, Tiled

_NEVER = (nn.Dropout, nn.Embedding, nn.Identity, nn.ModuleDict, nn.ModuleList)


class LowMemory:
    """Tiles on the modules of one model; `remove` ends it."""

    def __init__(
        self, model: Any, attentions: Iterable[nn.Module], attend: Callable[..., Any], say: Callable[[str], None]
    ) -> None:
        """attentions: the model's attention modules; attend: the attention function registered for them; say: hears
        of modules that cannot be tiled.
        """
        found = list(attentions)
        self._tiled: list[Tiled] = [TiledAttention(module, say, attend) for module in found]
        self._tiled += [PositionWise(module, say) for module in beside(model, found)]
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear):
            self._tiled.append(Logits(head, say))

    def remove(self) -> None:
        """Give every module its forward back."""
        for tiled in self._tiled:
            tiled.remove()
        self._tiled = []


def beside(model: nn.Module, attentions: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules around attention modules that may treat each token by itself, in order, each once.

    From each attention up to the list that its block is in, and to that list's owner: the other children of each. In
    blocks of the list that have no such attention, all children.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    found: dict[int, nn.Module] = {}
    on_the_way: set[int] = set()
    for attention in attentions:
        names = paths[id(attention)].split(".")
        chain = [model]
        for name in names:
            chain.append(chain[-1].get_submodule(name))
        lists = [at for at, module in enumerate(chain[:-1]) if isinstance(module, nn.ModuleList)]
        top = lists[-1] - 1 if lists else len(chain) - 2
        on_the_way |= {id(module) for module in chain}
        blocks = chain[lists[-1]].children() if lists else ()
        for owner in (*chain[top:-1], *blocks):
            if not isinstance(owner, nn.ModuleList):
                found |= {id(child): child for child in owner.children() if not isinstance(child, _NEVER)}
    return [module for key, module in found.items() if key not in on_the_way]
