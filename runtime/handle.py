"""What is at work on a model: puts itself into its configuration, and takes itself off again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from torch import nn

from artifacts import Artifact, HeadwiseError
from artifacts.errors import one_line
from runtime.allocator import keep_freed_memory
from runtime.attention.function import ATTENTION_NAME, register
from runtime.attention.state import Layer, Settings, forget, remember
from runtime.caches.make import make_cache
from runtime.layers import text_config
from runtime.memory import CacheBytes, cache_bytes

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


# How a call was served, by the name that it is counted under; all other names are reasons for dense
# attention.
_SERVED = {"sparse": "sparse", "chosen": "decode", "kept": "kept"}


class _Name(str):
    """The attention's name in the configuration it is applied to; a copy of that has the attention
    from before."""

    former: str

    def __new__(cls, name: str, former: str) -> _Name:
        made = super().__new__(cls, name)
        made.former = former
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.former

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[str], tuple[str]]:
        return str, (self.former,)


class Handle:
    """What is at work on a model: an artifact, or dense attention. A context manager; undo() ends
    it.

    settings: how calls are served, and the counts of what served them.
    """

    def __init__(
        self,
        artifact: Artifact | None,
        model: PreTrainedModel,
        layers: dict[nn.Module, Layer],
        settings: Settings,
    ) -> None:
        self._artifact = artifact
        self._model: PreTrainedModel | None = model
        self.settings = settings
        self._layers = len(layers)
        self._sparse_layers = sum(_is_sparse(layer) for layer in layers.values())
        config = text_config(model)
        register()
        with ExitStack() as undo:
            undo.callback(
                setattr, model.config, "_attn_implementation", _implementations(model.config)
            )
            undo.callback(forget, config, list(layers))
            remember(config, layers, settings)
            former = _implementations(config)
            config._attn_implementation = {**former, "": _Name(ATTENTION_NAME, former[""])}
            # Where one of these fails the model is as it was.
            self._undo = undo.pop_all()
        if any(parameter.is_cpu for parameter in model.parameters()):
            keep_freed_memory()

    def __repr__(self) -> str:
        if self._model is None:
            return "<Handle: undone>"
        name = self._model.name_or_path or "without a name"
        artifact = "no artifact"
        if self._artifact is not None:
            artifact = f"artifact {(self._artifact.content_sha256 or 'unsaved')[:12]}"
        layers = f"{self._sparse_layers} of {self._layers} layers sparse"
        return f"<Handle: {type(self._model).__name__} {one_line(name)}, {artifact}, {layers}>"

    @property
    def _applied_to(self) -> PreTrainedModel:
        if self._model is None:
            raise HeadwiseError("this artifact is no longer applied: its handle was undone")
        return self._model

    def undo(self) -> None:
        """Give the model its former attention back, nested configurations too; later calls do
        nothing."""
        self._model = None
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def new_cache(self, *, offload: str = "auto") -> Cache:
        """An empty cache for one generation: see Headwise.new_cache."""
        return make_cache(self._artifact, self._applied_to, offload)

    def cache_bytes(self, cache: Cache) -> CacheBytes:
        """Bytes of memory that a cache holds on the device and in the bank, room for new tokens
        included."""
        return cache_bytes(cache)

    def stats(self) -> dict[str, Any]:
        """Calls of attention layers so far: {"sparse": n, "dense": {reason: n}}, and more with more
        sections.

        "sparse" are prefills by the patterns or, with prefill_ratio, by chosen tokens; with a
        decode section "decode" are steps by chosen tokens and "tokens" how many a KV head of a
        sparse layer read in one, on average; with a kv_cache section "kept" are calls served from a
        cache under policies."""
        artifact = self._artifact
        counts = self.settings.calls.total()
        sections = {
            "sparse": artifact,
            "chosen": artifact and artifact.decode,
            "kept": artifact and artifact.kv_cache,
        }
        result: dict[str, Any] = {
            _SERVED[name]: counts[name] for name, section in sections.items() if section is not None
        }
        result["dense"] = {how: count for how, count in counts.items() if how not in _SERVED}
        decode = self.settings.decode
        if decode is not None and (tokens := decode.tokens_read) is not None:
            result["tokens"] = tokens
        return result


def _is_sparse(layer: Layer) -> bool:
    """Whether a head of the layer has another pattern than dense."""
    return layer.plan is not None and any(
        pattern.kind != "dense" for pattern in layer.plan.patterns
    )


def _implementations(config: Any) -> dict[str, Any]:
    """What a configuration's _attn_implementation can be set to: its own and, by name, those nested
    in it."""
    nested = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": config._attn_implementation} | {
        name: _implementations(part) for name, part in nested.items() if part is not None
    }
