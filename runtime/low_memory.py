"""What `apply(model, low_memory=True)` puts on a model, and takes off again: see docs/runtime.md, "A million tokens".

Blocks of a decoder are found by the attention in them, without a table of model names: what stands beside it in its
block, and beside the list of blocks, and takes one tensor of hidden states, is run by tiles if it treats each token by
itself. Attention modules are run by tiles around their attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from runtime.attention_tiles import TiledAttention
from runtime.tiles import PositionWise, Tiled, whole_modules

# Bytes of logits from which on a caller hears that he asked for those of every token.
LOGITS = 1 << 30
_NEVER = (nn.Dropout, nn.Embedding, nn.Identity, nn.ModuleDict, nn.ModuleList)
_log = logging.getLogger("headwise")


class LowMemory:
    """Tiles on the modules of one model; `remove` ends it."""

    def __init__(self, model: nn.Module, attentions: Iterable[nn.Module], attend: Callable[..., Any]) -> None:
        """attentions: the model's attention modules; attend: the attention function registered for them."""
        self._said: set[str] = set()
        found = list(attentions)
        self._tiled: list[Tiled] = [TiledAttention(module, self._say, attend) for module in found]
        self._tiled += [PositionWise(module, self._say) for module in beside(model, found)]
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        )

    def remove(self) -> None:
        """Give every module its forward back."""
        for hook in self._hooks:
            hook.remove()
        for tiled in self._tiled:
            tiled.remove()
        self._tiled = []

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s", what)

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        # A router's logits are recorded call by call.
        asked = kwargs.get("output_router_logits")
        whole_modules.wanted = bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)
        self._expect_logits(model, args, kwargs)

    def _after(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            whole_modules.wanted = False

    def _expect_logits(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn where the logits of all tokens are asked for and take more than all else."""
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        head = model.get_output_embeddings()
        if kwargs.get("logits_to_keep") or not isinstance(ids, Tensor) or head is None:
            return
        size = ids.shape[0] * ids.shape[1] * head.weight.shape[0] * head.weight.element_size()
        if size > LOGITS:
            self._say(
                f"logits of all tokens were asked for, {size / 2**30:.1f} GiB at {ids.shape[1]} tokens: "
                "pass logits_to_keep=1, as generate() does"
            )


def beside(model: nn.Module, attentions: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules around attention modules that may treat each token by itself, in order, each once.

    From each attention up to the list that its block is in, and to that list's owner: the other children of each.
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
        for owner in chain[top:-1]:
            if not isinstance(owner, nn.ModuleList):
                found |= {id(child): child for child in owner.children() if not isinstance(child, _NEVER)}
    return [module for key, module in found.items() if key not in on_the_way]
