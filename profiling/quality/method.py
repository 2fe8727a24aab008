"""A method: an artifact in memory, or None for dense attention, and the cache that it decodes
with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from artifacts.store.hashing import canonical_json
from profiling.caches.policies import CacheKind, with_policy
from profiling.inside.oracle import choosing
from profiling.models.loading import LoadedModel
from profiling.speed.baselines import KERNEL, MODEL, dense
from runtime import Headwise
from runtime.layers import text_config


@dataclass(eq=False, kw_only=True)
class Method:
    """A method for one model at one length.

    dense: which dense attention it is where it has no artifact. identity: a hash of all that its
    results depend on but model, prompt and number format. density: share of the causal area that
    prefill computes, mean over heads, on the calibration prompt. kept: share of the prompt's keys
    and values that decode attends to. Both are None where nobody counted. evicts: its cache is no
    plain one, so that what it does shows in decode only. sizes: in words. offload: where keys and
    values that are not chosen are kept, as for Headwise.new_cache. check_weights: whether the
    model's weights have to be those that the artifact was made for. applied: puts it on a model
    where it is no artifact and none of the dense attentions; never timed. changed: makes another
    cache of the artifact's new one."""

    name: str
    make: Callable[[], Headwise | None]
    identity: str
    density: float | None = None
    kept: float | None = None
    evicts: bool = False
    sizes: str = ""
    dense: str = MODEL
    offload: str = "auto"
    check_weights: bool = False
    applied: Callable[[Any], AbstractContextManager[object]] | None = None
    changed: Callable[[Any], Any] | None = None

    @cached_property
    def headwise(self) -> Headwise | None:
        """The artifact in memory that does it; None is dense attention."""
        return self.make()

    def apply(self, model: Any) -> AbstractContextManager[Any]:
        """The method at work on the model, until it is left."""
        if self.applied is not None:
            return self.applied(model)
        return (
            dense(model, self.dense)
            if self.headwise is None
            else self.headwise.apply(model, check_weights=self.check_weights, strict=True)
        )

    def asked(self, model: Any) -> AbstractContextManager[object]:
        """The same where prompts are answered: what sdpa prefills Headwise's kernel decodes, many
        times as fast."""
        plain = self.applied is None and self.headwise is None and self.dense == MODEL
        own = str(text_config(model)._attn_implementation)
        return choosing(model, None) if plain and own == "sdpa" else self.apply(model)

    def cache(self, model: Any) -> Any:
        """An empty cache to prefill and decode with."""
        from transformers import DynamicCache

        if self.headwise is None:
            return DynamicCache(config=text_config(model))
        made = self.headwise.new_cache(model, offload=self.offload)
        return self.changed(made) if self.changed else made


def of_policy(loaded: LoadedModel, name: str, kind: CacheKind | None) -> Method:
    """Dense attention by Headwise's kernel, and layers that do not slide under one policy; None
    keeps everything."""
    made = None if kind is None else with_policy(loaded, kind.policy)
    return Method(
        name=name,
        make=lambda: made,
        identity=digest(name, None if kind is None else kind.policy.model_dump()),
        evicts=kind is not None,
        dense=KERNEL,
        changed=None if kind is None else kind.changed,
    )


def digest(*parts: Any) -> str:
    """A short hash of parts that JSON can hold."""
    return hashlib.sha256(canonical_json(list(parts))).hexdigest()[:16]
