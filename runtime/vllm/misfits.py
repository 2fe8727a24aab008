"""Misfits: reasons why vLLM cannot serve an artifact, and which layers it would serve how.

The worker refuses by them, and `headwise check` before it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from artifacts import Artifact, HeadwiseError
from artifacts.errors import ranges
from kernels import registry
from kernels.call import Operands
from runtime.caches.make import POLICIES
from runtime.fingerprint import compare, config_info
from runtime.layers import section_faults, why_not_full
from runtime.omnikv.select import Role
from runtime.vllm.counters import SPARSE
from runtime.vllm.policy_host import PagedPolicy, paged_policies, pagings_of

# Ways to make drafts: without a model, or with one whose layers are the parent's.
_DRAFTS = ("ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model", "medusa")
_WITHOUT = "set kv_cache to null in CFG, then headwise validate --rehash CFG"


def misfits(artifact: Artifact, config: Any, text: Any, size: int) -> Iterator[str]:
    """Reasons why the artifact cannot serve a model over `size` processes, most specific first.

    Args:
        artifact: the artifact to serve.
        config: the configuration of the model.
        text: the configuration of its language part.
        size: number of processes.
    """
    architecture = next(iter(getattr(config, "architectures", None) or ()), type(config).__name__)
    model = config_info(text, architecture, artifact.model.name)
    heads = model.num_heads
    kv_heads = model.num_kv_heads
    try:
        compare(artifact.model, model)
    except HeadwiseError as error:
        yield str(error)
    yield from section_faults(artifact, reasons_by_layer(text, artifact.model.num_layers))
    for name, policy in ({} if artifact.kv_cache is None else artifact.kv_cache.policies).items():
        reason = POLICIES[policy.kind].paging(policy).unsupported_reason
        if reason is not None:
            yield f"kv_cache.policies.{name} is {policy.kind}: {reason}: {_WITHOUT}"
    for layer, pagings in pagings_of(artifact).items():
        if len(set(pagings)) > 1 and any(paging.select is None for paging in pagings):
            reason = "vLLM's pages hold all heads of a layer; several snapkv policies are served"
            yield f"kv_cache.layers[{layer}] differs by head, and {reason}: {_WITHOUT}"
    if artifact.decode is not None:
        section = artifact.decode.omnikv
        if section.selector != "last":
            yield f"decode.omnikv.selector must be 'last' in vLLM, got {section.selector!r}"
        if section.prefill_ratio is not None:
            yield f"decode.omnikv.prefill_ratio must be null in vLLM, got {section.prefill_ratio}"
        if size > kv_heads:
            limit = f"at most {kv_heads} (KV heads) with a decode section"
            yield f"--tensor-parallel-size must be {limit}, got {size}"
    if heads % size or (kv_heads % size and size % kv_heads):
        sharded = f"{heads} query and {kv_heads} KV heads"
        yield f"--tensor-parallel-size: {sharded} do not divide among {size} processes"
    if getattr(text, "attention_chunk_size", None):
        yield "the model attends within chunks of the text, which vLLM serves as sequences"


def engine_misfits(artifact: Artifact, config: Any) -> Iterator[str]:
    """Reasons why the artifact cannot serve an engine with this VllmConfig.

    A later one supposes that the earlier ones do not hold.
    """
    import torch

    model = config.model_config
    parallel = config.parallel_config
    drafts = None if config.speculative_config is None else config.speculative_config.method
    if drafts is not None and drafts not in _DRAFTS:
        yield f"speculative decoding by {drafts} is not served: use {', '.join(_DRAFTS)} or none"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} must be 1 with an artifact, got {getattr(parallel, name)}"
    if artifact.decode is not None:
        if (stages := parallel.pipeline_parallel_size) > 1:
            yield f"--pipeline-parallel-size must be 1 with a decode section, got {stages}"
        if getattr(parallel, "use_ubatching", False):
            yield "split batches (--enable-dbo) are not served with a decode section"
    size = int(parallel.tensor_parallel_size)
    yield from misfits(artifact, model.hf_config, model.hf_text_config, size)
    policies = paged_policies(artifact)
    if model.rswa_window is not None and any(policy.selects for policy in policies.values()):
        yield "kv_cache with snapkv is not served for a model that has a window over its replies"
    if policies and drafts == "draft_model":
        # vLLM wants a draft model's layers in one group of its cache, and may spread them there.
        yield "speculative decoding by draft_model is not served where kv_cache drops tokens"
    if policies and config.kv_transfer_config is not None:
        yield "--kv-transfer-config is not served where kv_cache drops tokens"
    device = config.device_config.device
    empty = torch.empty(1, 1, 1, artifact.model.head_dim, dtype=model.dtype, device=device)
    _, missing = registry.fast("attention", Operands(empty, empty, empty))
    if missing is not None:
        yield f"no prefill can be sparse here: {missing}"


def why_dense(artifact: Artifact, layer: int, policy: PagedPolicy | None) -> str | None:
    """Reason why by the artifact no prefill of a layer is sparse, None where it is."""
    if policy is not None and policy.why_dense is not None:
        return policy.why_dense
    row = artifact.prefill.layers[layer]
    if row is None:
        return "left alone by the artifact"
    if all(artifact.patterns[name].kind == "dense" for name in row):
        return "every head is dense in the artifact"
    return None


def summary(
    reasons: Mapping[str, str], policies: Mapping[int, PagedPolicy], roles: Mapping[int, Role]
) -> list[str]:
    """Lines on layers: sparse, dense by reason, dropping tokens; and their roles in decode."""
    lines = [f"layers {reasons.get(SPARSE, 'none')} sparse"]
    lines += [f"layers {layers} dense: {why}" for why, layers in reasons.items() if why != SPARSE]
    texts = grouped((layer, str(each)) for layer, each in policies.items())
    lines += [f"layers {layers} keep {text}" for text, layers in texts.items()]
    if roles:
        filters = ranges(layer for layer, role in roles.items() if role.is_filter)
        readers = ranges(layer for layer, role in roles.items() if role.served_by is not None)
        lines.append(f"decode: layers {readers} read what layers {filters} choose")
    return lines


def reasons_by_layer(config: Any, count: int) -> dict[int, str | None]:
    """Reasons why layers do not see every token, by the configuration of a model's language part.

    None where a layer does.
    """
    return {layer: why_not_full(config, layer) for layer in range(count)}


def grouped(layers: Iterable[tuple[int, str]]) -> dict[str, str]:
    """Group layer numbers by text."""
    groups: dict[str, list[int]] = {}
    for layer, text in layers:
        groups.setdefault(text, []).append(layer)
    return {text: ranges(numbers) for text, numbers in groups.items()}
