"""Methods: an artifact in memory, or dense attention, and the cache that it decodes with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from artifacts import SnapKV
from artifacts.store.hashing import canonical_json
from profiling.caches.parsing import CacheKind
from profiling.caches.policies import drawing, with_policy
from profiling.inside.dense_decode import dense_decode
from profiling.models.loading import LoadedModel
from profiling.speed.baselines import KERNEL, MODEL, dense
from runtime import LoadedArtifact
from runtime.caches.make import check_takes_cache
from runtime.layers import text_config


@dataclass(eq=False, kw_only=True)
class Method:
    """A method for one model at one length.

    Attributes:
        make: makes the artifact in memory, None for dense attention.
        dense: which one that is.
        identity: a hash of all that its results depend on but model, prompt and number format.
        density: fraction of the causal area that prefill computes, mean over heads, on the
            calibration prompt.
        kept: fraction of the prompt's keys and values that decode attends to. Both are None where
            nobody counted.
        evicts: its cache is no plain one, so that its effect shows in decode only.
        sizes: in words.
        offload: as in LoadedArtifact.new_cache.
        check_weights: the model's weights must be the artifact's.
        changed: makes another cache of the artifact's new one.
    """

    name: str
    make: Callable[[], LoadedArtifact | None]
    identity: str
    density: float | None = None
    kept: float | None = None
    evicts: bool = False
    sizes: str = ""
    dense: str = MODEL
    offload: str = "auto"
    check_weights: bool = False
    changed: Callable[[Any], Any] | None = None

    @cached_property
    def headwise(self) -> LoadedArtifact | None:
        """The artifact in memory; None is dense attention."""
        return self.make()

    @property
    def drops(self) -> bool:
        """True if its cache drops tokens: it is filled by attention, and takes none back."""
        return self.headwise is not None and self.headwise.artifact.kv_cache is not None

    def apply(self, model: Any) -> AbstractContextManager[Any]:
        """Put the method on the model, until the context is left."""
        if self.headwise is None:
            return dense(model, self.dense)
        return self.headwise.apply(model, check_weights=self.check_weights, strict=True)

    def asked(self, model: Any) -> AbstractContextManager[object]:
        """Put the method on the model to answer prompts.

        Headwise's kernel decodes what sdpa prefills, many times as fast.
        """
        plain = self.headwise is None and self.dense == MODEL
        if plain and str(text_config(model)._attn_implementation) == "sdpa":
            return dense_decode(model)
        return self.apply(model)

    def cache(self, model: Any) -> Any:
        """Make an empty cache to prefill and decode with."""
        from transformers import DynamicCache

        if self.headwise is None:
            check_takes_cache(model)
            return DynamicCache(config=text_config(model))
        new_cache = self.headwise.new_cache(model, offload=self.offload)
        if self.changed is not None:
            new_cache = self.changed(new_cache)
        return new_cache


def of_policy(loaded: LoadedModel, name: str, kind: CacheKind | None) -> Method:
    """Method of dense attention by Headwise's kernel over a cache of one policy.

    Args:
        loaded: the model.
        name: of the method.
        kind: the policy of all layers that are no sliding-window layers; None keeps everything.
    """
    if kind is None:
        return Method(name=name, make=lambda: None, identity=digest(name, None), dense=KERNEL)
    served = with_policy(loaded, kind.policy)
    changed = None
    if kind.random:
        assert isinstance(kind.policy, SnapKV)
        changed = partial(drawing, record=kind.policy)
    return Method(
        name=name,
        make=lambda: served,
        identity=digest(name, kind.policy.model_dump()),
        evicts=True,
        dense=KERNEL,
        changed=changed,
    )


def digest(*parts: Any) -> str:
    """Hash parts that JSON can hold, in 16 hexadecimal digits."""
    return hashlib.sha256(canonical_json(list(parts))).hexdigest()[:16]
