"""A method: an artifact in memory, or None for dense attention, and the cache that it decodes with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from artifacts import SnapKV
from artifacts.hashing import canonical_json
from artifacts.kv_cache import Policy
from profiling.caches.policies import with_policy
from profiling.caches.random_eviction import drawing
from profiling.inside.oracle import choosing
from profiling.models.loading import LoadedModel
from profiling.speed.baselines import KERNEL, MODEL, dense
from runtime import Headwise
from runtime.layers import text_config


@dataclass(eq=False, kw_only=True)
class Method:
    """A method for one model at one length.

    dense: which dense attention it is where it has no artifact.
    density: share of the causal area that prefill computes, mean over heads, on the calibration prompt.
    kept: share of the prompt's keys and values that decode attends to. Both are None where nobody counted.
    identity: a hash of all that its results depend on but model, prompt and number format.
    evicts: its cache is no plain one, so that what it does shows in decode only.
    sizes: in words.
    applied: puts it on a model where it is no artifact and none of the dense attentions; never timed.
    changed: makes another cache of the artifact's new one.
    """

    name: str
    make: Callable[[], Headwise | None]
    density: float | None
    kept: float | None
    identity: str
    evicts: bool
    sizes: str
    dense: str = MODEL
    applied: Callable[[Any], AbstractContextManager[object]] | None = None
    changed: Callable[[Any], Any] | None = None

    @cached_property
    def headwise(self) -> Headwise | None:
        """The artifact in memory that does it; None is dense attention."""
        return self.make()

    def apply(self, model: Any) -> AbstractContextManager[object]:
        """The method at work on the model, until it is left."""
        if self.applied is not None:
            return self.applied(model)
        return (
            dense(model, self.dense)
            if self.headwise is None
            else self.headwise.apply(model, check_weights=False, strict=True)
        )

    def asked(self, model: Any) -> AbstractContextManager[object]:
        """The same where prompts are answered: what sdpa prefills Headwise's kernel decodes, many times as fast."""
        plain = self.applied is None and self.headwise is None and self.dense == MODEL
        own = str(text_config(model)._attn_implementation)
        return choosing(model, None) if plain and own == "sdpa" else self.apply(model)

    def cache(self, model: Any) -> Any:
        """An empty cache to prefill and decode with."""
        from transformers import DynamicCache

        if self.headwise is None:
            return DynamicCache(config=text_config(model))
        made = self.headwise.new_cache(model)
        return self.changed(made) if self.changed else made


def of_policy(loaded: LoadedModel, name: str, policy: Policy | None, *, draws: bool = False) -> Method:
    """Dense attention by Headwise's kernel, and layers that do not slide under one policy; None keeps everything.

    draws: the policy is SnapKV's, and what it keeps is drawn (profiling.caches.random_eviction).
    """
    made = None if policy is None else with_policy(loaded, policy)
    changed = None
    if draws:
        assert isinstance(policy, SnapKV)
        changed = partial(drawing, record=policy)
    return Method(
        name=name,
        make=lambda: made,
        density=None,
        kept=None,
        identity=digest(name, None if policy is None else policy.model_dump(), draws),
        evicts=policy is not None,
        sizes="",
        dense=KERNEL,
        changed=changed,
    )


def digest(*parts: Any) -> str:
    """A short hash of parts that JSON can hold."""
    return hashlib.sha256(canonical_json(list(parts))).hexdigest()[:16]
