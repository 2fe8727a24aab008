"""An artifact at work in one process of an engine: checked against its model, planned for the heads that are here."""

from __future__ import annotations

import atexit
import logging
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from artifacts import Artifact, HeadwiseError
from artifacts.errors import shorten
from runtime.allocator import keep_freed_memory
from runtime.attention.calls import no_kernel
from runtime.attention.turns import Turns
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.roles import Role
from runtime.plans import kernel_patterns, layer_plan
from runtime.vllm.batch import Piece, is_long
from runtime.vllm.counters import DENSE, SPARSE, Counters
from runtime.vllm.decode import Chooser
from runtime.vllm.dense import Stream
from runtime.vllm.fit import engine_misfits, keeps_of
from runtime.vllm.options import HASH_KEY, Options, options_of, ranges
from runtime.vllm.snapkv import Snap, Windows

# By vLLM's names; scales for each token or head are other caches.
_EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Below vLLM's own logger, whose level and format it has.
_log = logging.getLogger("vllm.headwise")


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedLayer:
    """What is served of one attention layer of vLLM in this process.

    number: by vLLM's name for it, None where the name has none or several. why_dense: why no prefill of it is sparse.
    turns: the plan of its heads and when that gains, where it has patterns. role: what it does by the decode section,
    None where that is nothing. keeps: the tokens that it keeps by the kv_cache section, None for all. owns: all of its
    requests are served here alone. eight_bits: what its cache of 8 bits holds, which vLLM hands out as bytes.
    """

    number: int | None
    why_dense: str | None = None
    turns: Turns | None = None
    role: Role | None = None
    keeps: Stream | Snap | None = None
    owns: bool = False
    eight_bits: torch.dtype | None = None

    @property
    def served(self) -> bool:
        """Whether anything of it is."""
        return self.owns or self.turns is not None or self.role is not None


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
        self._path, self.dense = options.artifact, options.dense
        headwise = options.load()
        self.artifact: Artifact = headwise.artifact
        if self.dense:
            self.artifact = self.artifact.model_copy(update={"decode": None, "kv_cache": None})
        parallel = config.parallel_config
        self._size = int(parallel.tensor_parallel_size)
        if config.device_config.device.type == "cpu":
            keep_freed_memory()
        # Every layer of the engine, by name, once there are any.
        self._every: dict[str, Any] = config.compilation_config.static_forward_context
        self._both_ways = bool(getattr(config.model_config, "is_mm_prefix_lm", False))
        # Tokens of the longest sequence that the engine takes.
        self.longest = int(config.model_config.max_model_len)
        for reason in engine_misfits(self.artifact, config):
            raise HeadwiseError(reason)
        # Not into the dict itself: that may be the caller's.
        config.additional_config = {**config.additional_config, HASH_KEY: self.artifact.content_sha256}
        self._patterns = kernel_patterns(self.artifact, headwise.arrays)
        # By name: what is served of each layer, and those that drop tokens.
        self._known: dict[str, ServedLayer] = {}
        self._keeps: dict[str, Stream | Snap] = {}
        self._said: set[str] = set()
        self.windows = Windows(int(config.scheduler_config.max_num_seqs))
        # Which layers are sparse here, and which are dense by which reason, once that was said.
        self._layers: dict[str, str] | None = None
        # Ranks are counted anew in each replica.
        process = parallel.data_parallel_rank * parallel.world_size + parallel.rank
        self.counters = Counters(None if options.stats is None else Path(options.stats) / f"headwise-{process}.json")
        atexit.register(self.counters.close)
        self.chooser = self._chooser(config)
        if self.chooser is not None:
            self.counters.read = self.chooser.tokens_read
        # One of the builders counts the pieces that they all see.
        self.counting: Any = None

    @property
    def dense_below(self) -> int:
        """Shorter contexts are left to the parent."""
        return self.artifact.prefill.dense_below

    def of(self, layer: Any) -> ServedLayer:
        """What is served of an attention layer of vLLM, worked out once, when its weights are loaded."""
        name = layer.layer_name
        if name not in self._known:
            self._known[name] = self._work_out(layer)
        return self._known[name]

    @property
    def asks_prompts(self) -> bool:
        """Whether a layer has to know how long prompts are, once vLLM has asked all layers what they cache."""
        return any(isinstance(keeps, Snap) for keeps in self._keeps.values())

    def tell_cache(self, impl: Any) -> None:
        """Before vLLM asks the layer of this implementation what it caches: a layer that drops tokens says so.

        Raises:
            HeadwiseError: it cannot be served so.
        """
        (layer,) = (each for each in self._every.values() if getattr(each, "impl", None) is impl)
        number = number_of(layer.layer_name)
        keeps = None if number is None else keeps_of(self.artifact).get(number)
        if keeps is None:
            return
        if (reason := self._unserved(layer)) is not None:
            raise HeadwiseError(
                f"kv_cache.layers[{number}] drops tokens, and the layer cannot be served here: {reason}"
            )
        self._keeps[layer.layer_name] = keeps
        if isinstance(keeps, Snap):
            if getattr(impl, "sinks", None) is not None:
                raise HeadwiseError(f"kv_cache.layers[{number}] cannot be served: the layer uses attention sinks")
            self._keeps[layer.layer_name] = Snap(keeps.policies[self._kv_heads()])
        from runtime.vllm import specs

        layer.get_kv_cache_spec = lambda config: specs.spec_of(layer, config, keeps)

    def is_long(self, piece: Piece) -> bool:
        """Whether a prefill may be served by patterns."""
        return not self.dense and is_long(piece, self.dense_below, self.artifact.prefill.dense_tail)

    def refuse(self, reason: str, detail: str = "") -> None:
        """What should have been sparse in a step is served by the parent: count it, and say so once."""
        self.counters.fell_back(reason)
        said = f"{reason}: {detail}" if detail else reason
        if said not in self._said:
            self._said.add(said)
            _log.warning("a prefill is served densely: %s", said)

    @property
    def agrees(self) -> bool:
        """Whether processes choose together: one that gives up would leave the others waiting."""
        return self.chooser is not None and self._size > 1

    @property
    def captures(self) -> bool:
        """Whether decode can be captured in CUDA graphs: nothing of it depends on what the host knows of a step."""
        if self.dense or self.artifact.kv_cache is not None:
            return False
        return self.chooser is None or self.chooser.captures

    def say(self, layers: list[Any]) -> None:
        """One line, once: which of these layers are sparse here, and why others are not."""
        if self._layers is not None:
            return
        by_reason: dict[str | None, list[int]] = {}
        for layer in layers:
            if (at := self.of(layer)).number is not None:
                by_reason.setdefault(at.why_dense, []).append(at.number)
        self._layers = {reason or SPARSE: ranges(numbers) for reason, numbers in by_reason.items()}
        sparse = ranges(by_reason.pop(None, []))
        dense = "".join(f"; {ranges(numbers)} dense: {reason}" for reason, numbers in by_reason.items())
        if self.chooser is not None:
            dense += f"; decode: {self.chooser}"
        for keeps in dict.fromkeys(each for each in self._keeps.values() if isinstance(each, Snap)):
            numbers = [number_of(name) for name, each in self._keeps.items() if each == keeps]
            dense += f"; layers {ranges([number for number in numbers if number is not None])} keep {keeps}"
        heads = "" if self._size == 1 else f", heads of rank {self._rank()} of {self._size}"
        _log.info(
            "Headwise serves prefill from %d tokens on by %s (content %s%s): layers %s sparse%s",
            *(self.dense_below, self._path, str(self.artifact.content_sha256)[:12], heads, sparse, dense),
        )

    def tell(self) -> None:
        """Now and then: what was served so far, to the log and to the file."""
        if (line := self.counters.line()) is not None:
            _log.info("Headwise: %s", line)
        self.counters.keep()

    def report(self) -> dict[str, Any]:
        """Which artifact, layers and counts; see Counters.report."""
        about = {"artifact": self._path, "content_sha256": self.artifact.content_sha256, "rank": self._rank()}
        return about | {"layers": self._layers or {}} | self.counters.report()

    def _chooser(self, config: Any) -> Chooser | None:
        if self.artifact.decode is None:
            return None
        section, group = self.artifact.decode.omnikv, None
        if self._size > 1:
            from vllm.distributed import get_tp_group

            group = get_tp_group().device_group
        kinds = getattr(config.model_config.hf_text_config, "layer_types", None)
        free = [i for i in range(self.artifact.model.num_layers) if not kinds or "sliding" not in kinds[i]]
        return Chooser(
            OmniKV(section, free, self._kv_heads(), backend="auto", group=group),
            requests=int(config.scheduler_config.max_num_seqs),
            longest=self.longest,
        )

    def _work_out(self, layer: Any) -> ServedLayer:
        number, keeps = number_of(layer.layer_name), self._keeps.get(layer.layer_name)
        if (reason := self._unserved(layer)) is not None:
            return ServedLayer(number=number, why_dense=reason, eight_bits=eight_bits(layer))
        assert number is not None
        turns, why_dense = None, self._why_dense(number, keeps)
        if why_dense is None:
            heads, rank = layer.impl.num_heads, self._rank()
            mine = slice(rank * heads, (rank + 1) * heads)
            plan = layer_plan(self.artifact, self._patterns, number, mine, layer.impl.num_kv_heads)
            turns = None if plan is None else Turns(plan)
        role = None if self.chooser is None else self.chooser.role(number)
        ours = layer.impl.ours and (turns is not None or role is not None)
        return ServedLayer(
            number=number,
            why_dense=why_dense,
            turns=turns,
            role=role,
            keeps=keeps,
            owns=bool(ours or self.dense or keeps is not None),
            eight_bits=eight_bits(layer),
        )

    def _why_dense(self, number: int, keeps: Stream | Snap | None) -> str | None:
        if self.dense:
            return DENSE
        if isinstance(keeps, Stream):
            return "it keeps its first and last tokens, by kv_cache"
        row = self.artifact.prefill.layers[number]
        if row is None:
            return "left alone by the artifact"
        if all(self.artifact.patterns[name].kind == "dense" for name in row):
            return "every head is dense in the artifact"
        return None

    def _unserved(self, layer: Any) -> str | None:
        """Why nothing of an attention layer is served here, whatever the artifact says of it."""
        impl, number = layer.impl, number_of(layer.layer_name)
        if not getattr(impl, "is_served", False):
            return "a draft model's, or another backend's"
        if str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder":
            return "no causal self-attention"
        if number is None or number >= self.artifact.model.num_layers:
            return "no layer of the artifact's model"
        if layer.sliding_window is not None:
            return "it slides"
        if impl.alibi_slopes is not None:
            return "it uses ALiBi"
        if layer.kv_cache_torch_dtype != layer.dtype and (reason := self._unread(layer)) is not None:
            return reason
        if layer.head_size_v != layer.head_size:
            return "its keys and values differ in size"
        return self._unowned(layer) if getattr(impl, "ours", False) else None

    def _unread(self, layer: Any) -> str | None:
        """Why a cache of another dtype than the layer's cannot be read here."""
        stored = eight_bits(layer)
        if stored is None:
            return f"its cache holds {shorten(layer.kv_cache_dtype)}, not {layer.dtype}"
        if layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1:
            return "its cache has a scale for each head"
        kept = torch.empty(1, 1, 1, self.artifact.model.head_dim, dtype=stored, device=layer._k_scale.device)
        return no_kernel("auto", kept.to(layer.dtype), kept, kept)

    def _unowned(self, layer: Any) -> str | None:
        """Why a layer of vLLM's CPU backend cannot be served here alone."""
        if self._both_ways:
            return "some of its tokens see each other both ways"
        shares = [
            getattr(getattr(each, "impl", None), "kv_sharing_target_layer_name", None) for each in self._every.values()
        ]
        if layer.impl.kv_sharing_target_layer_name is not None or layer.layer_name in shares:
            return "it shares its cache with another layer"
        return None

    def _kv_heads(self) -> slice:
        """The model's KV heads that this process has."""
        total = self.artifact.model.num_kv_heads
        start = self._rank() * total // self._size
        return slice(start, start + max(total // self._size, 1))

    @staticmethod
    def _rank() -> int:
        from vllm.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())


_latest: tuple[weakref.ref[Any], Served | None] | None = None


def served(config: Any) -> Served | None:
    """What a VllmConfig asks for, loaded at the first question; None where that is nothing, and for a draft model's."""
    global _latest
    if _latest is None or _latest[0]() is not config:
        # vLLM builds what makes drafts with a configuration that it derives from the engine's.
        if config.speculative_config is not None and HASH_KEY in (config.additional_config or {}):
            return None
        options = options_of(config.additional_config)
        _latest = weakref.ref(config), None if options is None else Served(options, config)
    return _latest[1]


def latest() -> Served | None:
    """What the latest engine of this process was asked for."""
    return None if _latest is None else _latest[1]


def number_of(layer_name: str) -> int | None:
    """The number of a layer by vLLM's name for it, None where the name has none or several."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else None


def eight_bits(layer: Any) -> torch.dtype | None:
    """What a cache of 8 bits holds, which vLLM hands out as bytes; None for any other cache."""
    return _EIGHT_BITS.get(str(getattr(layer, "kv_cache_dtype", None)))
