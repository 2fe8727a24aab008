"""Passes the cache of a forward to the attention of an artifact's decode section.

transformers calls an attention function with keys and values, not with their cache, and a model may
compute with the keys in between. But every attention module gets the cache as an argument, and
hands keyword arguments that it does not know on to its attention function. So a hook adds the cache
to them: nothing is remembered from one call to the next.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from artifacts import HeadwiseError
from runtime.attention.call import CACHE


class PassCache:
    """Hook before an attention module that passes the cache among its arguments on."""

    def __init__(self, attention: str) -> None:
        self.attention = attention

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with the cache, or None where there is none.

        None, too, where set_attn_implementation() has given the module another attention.
        """
        from transformers import Cache

        config: Any = module.config
        if config._attn_implementation != self.attention:
            return None
        for argument in (*kwargs.values(), *args):
            if isinstance(argument, Cache):
                return args, {**kwargs, CACHE: argument}
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module has nothing applied. A stored one loads without Headwise: it has a hook
        # of the standard library, which takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


def pass_cache(module: nn.Module, attention: str) -> RemovableHandle:
    """Have an attention module pass its cache on; the handle's remove() ends it.

    Args:
        module: the attention module.
        attention: name of the attention function that takes it.

    Raises:
        HeadwiseError: the module takes no further keyword arguments.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters):
        raise HeadwiseError(
            f"{type(module).__name__}.forward takes no **kwargs for its attention function: the "
            f"decode section cannot serve it"
        )
    return module.register_forward_pre_hook(PassCache(attention), with_kwargs=True)
