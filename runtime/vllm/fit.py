"""Whether an artifact can serve a model inside vLLM, and why not: one answer for the engine and for `check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from artifacts import Artifact, HeadwiseError
from artifacts.kv_cache import Policy, SnapKV, Streaming
from runtime.attention.calls import no_kernel
from runtime.fingerprint import compare, config_info
from runtime.vllm.snapkv import Snap

T = TypeVar("T")
# Ways to make drafts: without a model, or with one whose layers are the parent's.
_DRAFTS = ("ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model", "medusa")


def misfits(artifact: Artifact, config: Any, architecture: str, *, tensor_parallel: int) -> Iterator[str]:
    """Why the artifact cannot serve, most telling first; nothing where it can.

    Args:
        artifact: what is to be served.
        config: the configuration of the model's language part, as transformers has it.
        architecture: the name of the model's class.
        tensor_parallel: over how many processes heads are sharded.
    """
    found = config_info(config, architecture, artifact.model.name)
    heads, kv_heads, size = found.num_heads, found.num_kv_heads, tensor_parallel
    try:
        compare(artifact.model, found)
    except HeadwiseError as error:
        yield str(error)
    yield from _unkept(artifact)
    section = None if artifact.decode is None else artifact.decode.omnikv
    if section is not None and section.selector != "last":
        yield f"decode.omnikv.selector is {section.selector!r}: vLLM keeps no earlier queries' scores, 'last' is served"
    if section is not None and size > kv_heads:
        yield f"--tensor-parallel-size must be at most {kv_heads} (KV heads) with a decode section, got {size}"
    if section is not None and section.prefill_ratio is not None:
        yield f"decode.omnikv.prefill_ratio is {section.prefill_ratio}: in vLLM a chunk sees all of the past, use null"
    if heads % size or (kv_heads % size and size % kv_heads):
        yield f"{heads} query and {kv_heads} KV heads do not divide among {size} processes (--tensor-parallel-size)"
    if getattr(config, "attention_chunk_size", None):
        yield "the model attends within chunks of the text, which vLLM serves as sequences of their own"


def engine_misfits(artifact: Artifact, config: Any) -> Iterator[str]:
    """Why the artifact cannot serve an engine, most telling first; nothing where it can. config: vLLM's VllmConfig."""
    model, parallel, speculative = config.model_config, config.parallel_config, config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTS:
        yield f"speculative decoding by {speculative.method} is not served: use {', '.join(_DRAFTS)} or none"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name} must be 1 with an artifact, got {getattr(parallel, name)}"
    if artifact.decode is not None and parallel.pipeline_parallel_size > 1:
        yield f"--pipeline-parallel-size must be 1 with a decode section, got {parallel.pipeline_parallel_size}"
    if artifact.decode is not None and getattr(parallel, "use_ubatching", False):
        yield "batches in parts (--enable-dbo) are not served with a decode section"
    keeps = keeps_of(artifact)
    if any(isinstance(each, Snap) for each in keeps.values()) and model.rswa_window is not None:
        yield "kv_cache with snapkv is not served for a model that has a window over its replies"
    if keeps and speculative is not None and speculative.method == "draft_model":
        # vLLM wants the layers of a draft model in one group of its cache, and may spread them over several there.
        yield "speculative decoding by draft_model is not served where kv_cache drops tokens: use eagle"
    if keeps and config.kv_transfer_config is not None:
        yield "--kv-transfer-config is not served where kv_cache drops tokens: the first ones would miss"
    architecture = next(iter(getattr(model.hf_config, "architectures", None) or ()), "")
    size = int(parallel.tensor_parallel_size)
    yield from misfits(artifact, model.hf_text_config, architecture, tensor_parallel=size)
    empty = torch.empty(1, 1, 1, artifact.model.head_dim, dtype=model.dtype, device=config.device_config.device)
    if missing := no_kernel("auto", empty, empty, empty):
        yield f"no prefill can be sparse here: {missing}"


def keeps_of(artifact: Artifact) -> dict[int, Streaming | Snap]:
    """By layer, what is kept in layers that drop tokens, by all KV heads of the model; of an artifact that fits."""
    found: dict[int, Streaming | Snap] = {}
    for number, policies in _policies(artifact):
        snaps = tuple(policy for policy in policies if isinstance(policy, SnapKV))
        if snaps:
            found[number] = Snap(snaps)
        elif policies and isinstance(policies[0], Streaming):
            found[number] = policies[0]
    return found


def why_dense(artifact: Artifact, layer: int) -> str | None:
    """Why by the artifact's patterns no prefill of a layer is sparse, None where it is."""
    row = artifact.prefill.layers[layer]
    if row is None:
        return "left alone by the artifact"
    if all(artifact.patterns[name].kind == "dense" for name in row):
        return "every head is dense in the artifact"
    return None


def full_layers(config: Any, count: int) -> list[int]:
    """Those of a model's layers that do not slide, by the configuration of its language part."""
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None
    return [layer for layer in range(count) if not ("sliding" in kinds[layer] if kinds else slides)]


def grouped(layers: Iterable[tuple[int, T]]) -> dict[T, str]:
    """Layers by what there is to say of them."""
    found: dict[T, list[int]] = {}
    for layer, what in layers:
        found.setdefault(what, []).append(layer)
    return {what: ranges(numbers) for what, numbers in found.items()}


def ranges(numbers: Iterable[int]) -> str:
    """0-3, 5 for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def _unkept(artifact: Artifact) -> Iterator[str]:
    """What of a kv_cache section vLLM's pages cannot do: they hold all heads of a layer, and go as a whole."""
    section = artifact.kv_cache
    out = "leave the section out (headwise merge CFG --kv-cache none --out NEW)"
    for name, policy in ({} if section is None else section.policies).items():
        if policy.kind == "h2o":
            yield (
                f"kv_cache.policies.{name} is h2o: it drops other tokens in each head at every step, and vLLM frees "
                f"whole pages of all heads; streaming and snapkv are served: {out}"
            )
        if isinstance(policy, Streaming) and policy.positions != "original":
            yield (
                f"kv_cache.policies.{name}.positions is {policy.positions!r}: vLLM rotates keys before they are kept, "
                "'original' is served"
            )
    for number, policies in _policies(artifact):
        if len(set(policies)) > 1 and any(policy.kind != "snapkv" for policy in policies):
            yield (
                f"kv_cache.layers[{number}] differs by head, and vLLM's pages hold all heads of a layer; several "
                f"snapkv policies are served: {out}"
            )


def _policies(artifact: Artifact) -> Iterator[tuple[int, tuple[Policy, ...]]]:
    """The layers of a kv_cache section, and the policy of each of their KV heads."""
    section = artifact.kv_cache
    for number in range(0 if section is None else len(section.layers)):
        assert section is not None
        names = section.heads(number, artifact.model.num_kv_heads) or ()
        yield number, tuple(section.policies[name] for name in names)
