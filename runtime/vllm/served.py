"""An artifact at work in one process of an engine: checked against its model, planned for the heads that are here."""

from __future__ import annotations

import weakref
from typing import Any

from artifacts import Artifact, HeadwiseError, Streaming
from runtime.allocator import keep_freed_memory
from runtime.omnikv.decode import OmniKV
from runtime.plans import layer_plans, part_of
from runtime.vllm.batch import Piece, is_long
from runtime.vllm.counters import DENSE, SPARSE, Counters, log, metrics
from runtime.vllm.decode import Chooser
from runtime.vllm.fit import engine_misfits, full_layers, grouped, keeps_of, why_dense
from runtime.vllm.layers import ServedLayer, eight_bits, number_of, why_unserved
from runtime.vllm.options import HASH_KEY, Options, options_of
from runtime.vllm.snapkv import Snap


class Served:
    """What an engine's additional configuration asked for, in one process."""

    def __init__(self, options: Options, config: Any) -> None:
        """Load and check.

        Args:
            options: which artifact.
            config: vLLM's VllmConfig.

        Raises:
            HeadwiseError: the artifact cannot be loaded or cannot serve this engine; one line says why.
        """
        headwise = options.load()
        self.artifact: Artifact = headwise.artifact
        self._path, self.dense = options.artifact, options.dense
        if self.dense:
            self.artifact = self.artifact.model_copy(update={"decode": None, "kv_cache": None})
        if config.device_config.device.type == "cpu":
            keep_freed_memory()
        for reason in engine_misfits(self.artifact, config):
            raise HeadwiseError(reason)
        # Not into the dict itself: that may be the caller's.
        config.additional_config = {**config.additional_config, HASH_KEY: self.artifact.content_sha256}
        model = config.model_config
        self._size = int(config.parallel_config.tensor_parallel_size)
        self._both_ways = bool(getattr(model, "is_mm_prefix_lm", False))
        # Tokens of the longest sequence that the engine takes.
        self.longest = int(model.max_model_len)
        self._plans = layer_plans(self.artifact, headwise.arrays)
        self._keeps = keeps_of(self.artifact)
        # Every layer of the engine, by name, once there are any; and what is served of those that were asked for.
        self._every: dict[str, Any] = config.compilation_config.static_forward_context
        self._known: dict[str, ServedLayer] = {}
        # Which layers are sparse here, and which are dense by which reason, once that was said.
        self._layers: dict[str, str] | None = None
        self._requests = int(config.scheduler_config.max_num_seqs)
        self.counters = Counters(metrics())
        self.chooser = self._chooser(config)
        # One of the builders counts the pieces that they all see.
        self.counting: Any = None

    def of(self, layer: Any) -> ServedLayer:
        """What is served of an attention layer of vLLM, worked out once, when its weights are loaded."""
        name = layer.layer_name
        if name not in self._known:
            self._known[name] = self._work_out(layer)
        return self._known[name]

    def tell_cache(self, impl: Any) -> None:
        """Before vLLM asks the layer of this implementation what it caches: a layer that drops tokens says so.

        Raises:
            HeadwiseError: it cannot be served so.
        """
        (layer,) = (each for each in self._every.values() if getattr(each, "impl", None) is impl)
        at = self.of(layer)
        if at.number not in self._keeps:
            return
        where, keeps = f"kv_cache.layers[{at.number}]", self._keeps[at.number]
        if at.keeps is None:
            raise HeadwiseError(f"{where} drops tokens, and the layer cannot be served here: {at.why_dense}")
        if isinstance(keeps, Snap) and getattr(impl, "sinks", None) is not None:
            raise HeadwiseError(f"{where} cannot be served: the layer uses attention sinks")
        from runtime.vllm import specs

        layer.get_kv_cache_spec = lambda config: specs.spec_of(layer, config, keeps)

    @property
    def asks_prompts(self) -> bool:
        """Whether a layer has to know how long prompts are, once vLLM has asked all layers what they cache."""
        return any(isinstance(at.keeps, Snap) for at in self._known.values())

    def is_long(self, piece: Piece) -> bool:
        """Whether a prefill may be served by patterns."""
        prefill = self.artifact.prefill
        return not self.dense and is_long(piece, prefill.dense_below, prefill.dense_tail)

    def say(self, layers: list[Any]) -> None:
        """One line, once: which of these layers are sparse here, and why others are not."""
        if self._layers is not None:
            return
        served = [(at.number, at) for at in map(self.of, layers) if at.number is not None]
        self._layers = grouped((number, at.why_dense or SPARSE) for number, at in served)
        parts = [f"layers {self._layers.get(SPARSE, 'none')} sparse"]
        parts += [f"{numbers} dense: {why}" for why, numbers in self._layers.items() if why != SPARSE]
        parts += [f"decode: {self.chooser}"] if self.chooser is not None else []
        snaps = grouped((number, str(at.keeps)) for number, at in served if isinstance(at.keeps, Snap))
        parts += [f"layers {numbers} keep {keeps}" for keeps, numbers in snaps.items()]
        heads = "" if self._size == 1 else f", heads of rank {_rank()} of {self._size}"
        about = (self.artifact.prefill.dense_below, self._path, str(self.artifact.content_sha256)[:12], heads)
        log.info("Headwise serves prefill from %d tokens on by %s (content %s%s): %s", *about, "; ".join(parts))

    def report(self) -> dict[str, Any]:
        """Which artifact, layers and counts; see Counters.report."""
        about = {"artifact": self._path, "content_sha256": self.artifact.content_sha256, "rank": _rank()}
        return about | {"layers": self._layers or {}} | self.counters.report()

    def _chooser(self, config: Any) -> Chooser | None:
        if self.artifact.decode is None:
            return None
        group = None
        if self._size > 1:
            from vllm.distributed import get_tp_group

            group = get_tp_group().device_group
        full = full_layers(config.model_config.hf_text_config, self.artifact.model.num_layers)
        omni = OmniKV(self.artifact.decode.omnikv, full, backend="auto", group=group)
        self.counters.read = lambda: omni.tokens_read
        return Chooser(omni, requests=self._requests, longest=self.longest)

    def _work_out(self, layer: Any) -> ServedLayer:
        number, num_layers = number_of(layer.layer_name), self.artifact.model.num_layers
        why = why_unserved(layer, self._every.values(), num_layers=num_layers, both_ways=self._both_ways)
        if number is None or why is not None:
            return ServedLayer(number=number, why_dense=why)
        keeps, plan = self._keeps.get(number), None
        if isinstance(keeps, Snap):
            keeps = Snap(keeps.policies[self._kv_heads()], self._requests)
        if self.dense:
            why = DENSE
        elif isinstance(keeps, Streaming):
            why = "it keeps its first and last tokens, by kv_cache"
        else:
            why = why_dense(self.artifact, number)
        if why is None:
            first, heads = _rank() * layer.impl.num_heads, layer.impl.num_heads
            plan = part_of(self._plans.get(number), slice(first, first + heads), layer.impl.num_kv_heads)
        role = None if self.chooser is None else self.chooser.role(number)
        return ServedLayer(
            number=number,
            why_dense=why,
            plan=plan,
            role=role,
            keeps=keeps,
            owns=bool(self.dense or plan is not None or role is not None or keeps is not None),
            eight_bits=eight_bits(layer),
        )

    def _kv_heads(self) -> slice:
        """The model's KV heads that this process has."""
        total = self.artifact.model.num_kv_heads
        start = _rank() * total // self._size
        return slice(start, start + max(total // self._size, 1))


_latest: tuple[weakref.ref[Any], Served | None] | None = None


def served(config: Any) -> Served | None:
    """What a VllmConfig asks for, loaded at the first question; None where that is nothing, and for a draft model's."""
    global _latest
    if makes_drafts(config):
        return None
    if _latest is None or _latest[0]() is not config:
        options = options_of(config.additional_config)
        _latest = weakref.ref(config), None if options is None else Served(options, config)
    return _latest[1]


def makes_drafts(config: Any) -> bool:
    """Whether a VllmConfig is of what makes drafts: vLLM derives it from the engine's."""
    if HASH_KEY not in (config.additional_config or {}) or config.speculative_config is None:
        return False
    return _latest is None or _latest[0]() is not config


def latest() -> Served | None:
    """What the latest engine of this process was asked for."""
    return None if _latest is None else _latest[1]


def _rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
