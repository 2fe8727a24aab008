"""Artifact in one process of an engine: checked, and planned for the heads of the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from artifacts import Artifact, HeadwiseError
from artifacts.errors import shorten
from kernels import registry
from kernels.call import Operands
from kernels.patterns import LayerPlan
from runtime.allocator import keep_freed_memory
from runtime.attention.chunk import Chunk
from runtime.attention.context import is_long
from runtime.layers import SLIDES, make_plans, slice_heads
from runtime.omnikv.select import Selector
from runtime.vllm.counters import SPARSE, Counters, log
from runtime.vllm.filters import FilterDecode
from runtime.vllm.misfits import engine_misfits, grouped, reasons_by_layer, summary, why_dense
from runtime.vllm.options import HASH_KEY, Options, options_of
from runtime.vllm.policy_host import PagedPolicy, paged_policies

# Caches of 8 bits with one scale, by vLLM's names.
_EIGHT_BITS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedLayer:
    """Attention layer of vLLM in this process, and how it is served.

    Attributes:
        number: None where its name has none or several.
        why_dense: reason why no prefill is sparse.
        plan: of its heads here, None where no patterns serve.
        policy: its policy, None if it keeps every token.
        owned: all its requests are served here; those of any other layer are vLLM's.
        ours: its pages are laid out for our kernels.
        eight_bits: dtype of a cache of 8 bits, which vLLM hands out as bytes.
    """

    number: int | None
    why_dense: str | None = None
    plan: LayerPlan | None = None
    policy: PagedPolicy | None = None
    owned: bool = False
    ours: bool = False
    eight_bits: torch.dtype | None = None


class Engine:
    """Artifact of an engine's additional configuration, in one process."""

    # True after a prefill longer than the measured lengths was logged.
    _long_reported = False

    def __init__(self, options: Options, config: Any) -> None:
        """Load and check for an engine's VllmConfig; HeadwiseError where it cannot be served."""
        headwise = options.load()
        self.artifact: Artifact = headwise.artifact
        self.path = options.artifact
        # Reason why no prefill uses patterns, if an option disables them.
        self.dense = "dense by kernel" if options.dense else None
        if options.dense:
            self.artifact = self.artifact.model_copy(update={"decode": None, "kv_cache": None})
        if config.device_config.device.type == "cpu":
            keep_freed_memory()
        for reason in engine_misfits(self.artifact, config):
            raise HeadwiseError(reason)
        content = self.artifact.content_sha256
        # Not into the dict itself: that may be the caller's.
        config.additional_config = {**config.additional_config, HASH_KEY: content}
        # Most tokens of a sequence.
        self.longest = int(config.model_config.max_model_len)
        self.size = int(config.parallel_config.tensor_parallel_size)
        self.counters = Counters()
        # Reasons why layers do not see every token, None where they do.
        self._not_full = reasons_by_layer(
            config.model_config.hf_text_config, self.artifact.model.num_layers
        )
        self.filter_decode = self._filter_decode(config)
        # By vLLM's names.
        self.layers: dict[str, ServedLayer] = {}
        # True if a layer needs the lengths of prompts.
        self.needs_prompts = False
        # Numbers of layers, by how they are served.
        self._reasons: dict[str, str] = {}
        self._plans = make_plans(self.artifact)
        self._config = weakref.ref(config)
        # The builder that counts the prefills, which all builders see.
        self.counting: Any = None

    def prepare(self) -> None:
        """Plan every layer, once, when weights are loaded.

        Layers that drop tokens get their own cache specification, before vLLM asks for it.

        Raises:
            HeadwiseError: such a layer cannot be served.
        """
        config = self.config
        if self.layers or config is None:
            return
        modules = {}
        shared = set()
        for name, module in config.compilation_config.static_forward_context.items():
            impl = getattr(module, "impl", None)
            target = getattr(impl, "kv_sharing_target_layer_name", None)
            if target is not None:
                shared |= {name, target}
            if getattr(impl, "ours", None) is not None:
                modules[name] = module
        model = self.artifact.model
        first = _rank() * model.num_kv_heads // self.size
        heads = slice(first, first + max(model.num_kv_heads // self.size, 1))
        policies = paged_policies(self.artifact, heads, int(config.scheduler_config.max_num_seqs))
        self.needs_prompts = any(policy.selects for policy in policies.values())
        both_ways = bool(getattr(config.model_config, "is_mm_prefix_lm", False))
        for name, module in modules.items():
            number = number_of(name)
            why = why_unserved(module)
            if number is None or number >= model.num_layers:
                why = "no layer of the artifact's model"
            elif (not_full := self._not_full[number]) is not None:
                why = f"it {not_full}"
            elif module.impl.ours and both_ways:
                why = "some of its tokens see each other both ways"
            elif module.impl.ours and name in shared:
                why = "it shares its cache with another layer"
            layer = ServedLayer(number=number, why_dense=why)
            if number is not None and why is None:
                layer = self._served(number, module, policies.get(number))
            self.layers[name] = layer
            if number in policies:
                self._set_spec(module, layer, policies[number])

    @property
    def config(self) -> Any:
        """The VllmConfig that this was made for; None once vLLM has dropped it."""
        return self._config()

    def served_layer(self, module: Any) -> ServedLayer:
        """Plan of an attention layer of vLLM."""
        name = module.layer_name
        if name not in self.layers:
            why = "a draft model's, or another backend's"
            self.layers[name] = ServedLayer(number=number_of(name), why_dense=why)
        return self.layers[name]

    def is_sparse(self, chunk: Chunk) -> bool:
        """True for a prefill that patterns may serve: long enough, and beyond the dense tail."""
        if self.dense is not None:
            return False
        prefill = self.artifact.prefill
        return is_long(chunk.q_len, chunk.k_len, prefill.dense_below, prefill.dense_tail)

    def check_length(self, chunks: Iterable[Chunk]) -> None:
        """Log once if one of these sparse prefills is longer than the measured lengths."""
        longest = max((chunk.k_len for chunk in chunks), default=0)
        line = self.artifact.evidence.beyond(longest)
        if line is not None and not self._long_reported:
            self._long_reported = True
            log.warning("%s", line)

    def log(self, modules: Iterable[Any]) -> None:
        """Log one line, once: the sparse ones of these layers, and reasons for the others."""
        if self._reasons:
            return
        served = map(self.served_layer, modules)
        layers = [(each.number, each) for each in served if each.number is not None]
        self._reasons = grouped((number, each.why_dense or SPARSE) for number, each in layers)
        policies = {number: each.policy for number, each in layers if each.policy is not None}
        roles = {} if self.filter_decode is None else self.filter_decode.selector.roles
        log.info(
            "Headwise serves prefill from %d tokens on by %s (content %s%s): %s",
            self.artifact.prefill.dense_below,
            self.path,
            str(self.artifact.content_sha256)[:12],
            "" if self.size == 1 else f", heads of rank {_rank()} of {self.size}",
            "; ".join(summary(self._reasons, policies, roles)),
        )

    def report(self) -> dict[str, Any]:
        """Artifact, layers and counts; see Counters.report.

        With a decode section, tokens_read: mean tokens that a request with more of them reads in a
        step, in a layer that is no filter layer; None before any.
        """
        content = self.artifact.content_sha256
        report = {"artifact": self.path, "content_sha256": content, "rank": _rank()}
        report |= {"layers": self._reasons} | self.counters.report()
        if self.filter_decode is not None:
            report["tokens_read"] = self.counters.tokens_read
        return report

    def _filter_decode(self, config: Any) -> FilterDecode | None:
        if self.artifact.decode is None:
            return None
        group = None
        if self.size > 1:
            from vllm.distributed import get_tp_group

            group = get_tp_group().device_group
        full = [layer for layer, why in self._not_full.items() if why is None]
        selector = Selector(self.artifact.decode.omnikv, full, group=group)
        requests = int(config.scheduler_config.max_num_seqs)
        return FilterDecode(selector, requests=requests, longest=self.longest)

    def _served(self, number: int, module: Any, policy: PagedPolicy | None) -> ServedLayer:
        """Plan a layer that can be served."""
        impl = module.impl
        why = self.dense or why_dense(self.artifact, number, policy)
        plan = None
        if why is None:
            first = _rank() * impl.num_heads
            heads = slice(first, first + impl.num_heads)
            plan = slice_heads(self._plans.get(number), heads, impl.num_kv_heads)
        decodes = self.filter_decode is not None and number in self.filter_decode.roles
        owned = decodes or any(x is not None for x in (self.dense, plan, policy))
        return ServedLayer(
            number=number,
            why_dense=why,
            plan=plan,
            policy=policy,
            owned=owned,
            ours=owned and impl.ours,
            eight_bits=_EIGHT_BITS.get(str(module.kv_cache_dtype)),
        )

    def _set_spec(self, module: Any, layer: ServedLayer, policy: PagedPolicy) -> None:
        """Give a layer that drops tokens its own cache specification."""
        where = f"kv_cache.layers[{layer.number}]"
        if layer.policy is None:
            raise HeadwiseError(f"{where} drops tokens, but the layer is dense: {layer.why_dense}")
        # A selection counts no learned logits.
        if policy.selects and getattr(module.impl, "sinks", None) is not None:
            raise HeadwiseError(f"{where} cannot be served: the layer uses attention sinks")
        full_spec = module.get_kv_cache_spec
        longest = self.longest

        def spec(config: Any) -> Any:
            from runtime.vllm.specs import paged_spec

            return paged_spec(full_spec(config), policy.every, longest)

        # The only way: vLLM asks each layer itself, has no option for a layer of another class, and
        # asks a backend (customize_spec) without the name of the layer.
        module.get_kv_cache_spec = spec


def number_of(layer_name: str) -> int | None:
    """Number of a layer in vLLM's name for it, None where the name has none or several."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdecimal()]
    if len(numbers) == 1:
        return numbers[0]
    return None


def why_unserved(module: Any) -> str | None:
    """Reason why an attention layer is not served here, for any artifact."""
    if str(getattr(module.attn_type, "value", module.attn_type)) != "decoder":
        return "no causal self-attention"
    # By the configuration such a layer sees every token; vLLM sets this window.
    if module.sliding_window is not None:
        return f"it {SLIDES}"
    if module.impl.alibi_slopes is not None:
        return "it uses ALiBi"
    if module.head_size_v != module.head_size:
        return "its keys and values differ in size"
    if module.kv_cache_torch_dtype == module.dtype:
        return None
    eight_bits = _EIGHT_BITS.get(str(module.kv_cache_dtype))
    if eight_bits is None:
        return f"its cache holds {shorten(module.kv_cache_dtype)}, not {module.dtype}"
    if module._k_scale.numel() > 1 or module._v_scale.numel() > 1:
        return "its cache has a scale for each head"
    size = module.head_size
    device = module._k_scale.device
    key = torch.empty(1, 1, 1, size, dtype=eight_bits, device=device)
    return registry.fast("attention", Operands(key.to(module.dtype), key, key))[1]


# vLLM makes backends, builders and layers from its own configuration, and hands no object of ours
# from one to the next: the engine of a process is found by that configuration.
_latest: Engine | None = None


def engine_of(config: Any) -> Engine | None:
    """Engine of a VllmConfig, made at the first call; None without an artifact or for drafts."""
    global _latest
    if makes_drafts(config):
        return None
    options = options_of(config.additional_config)
    if options is None:
        _latest = None
    elif _latest is None or _latest.config is not config:
        _latest = Engine(options, config)
    return _latest


def drafts_of(config: Any) -> int:
    """Drafts that a step verifies for a request; 0 without speculative decoding."""
    return getattr(config.speculative_config, "num_speculative_tokens", None) or 0


def makes_drafts(config: Any) -> bool:
    """True for the VllmConfig of a draft model.

    vLLM derives it from the engine's, with the same object for speculative decoding. The engine of
    this process is made first: vLLM loads the served model before its drafts.
    """
    own = None if _latest is None else _latest.config
    if own is None or own is config or config.speculative_config is None:
        return False
    return config.speculative_config is own.speculative_config


def latest() -> Engine | None:
    """Latest engine of this process, None where it has no artifact."""
    return _latest


def _rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
