"""Whether an artifact can serve a model inside vLLM, and why not: one answer for the engine and for `check`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from artifacts import Artifact, HeadwiseError
from runtime.fingerprint import compare, config_info


def misfits(artifact: Artifact, config: Any, architecture: str, *, tensor_parallel: int) -> Iterator[str]:
    """Why the artifact cannot serve, most telling first; nothing where it can.

    Args:
        artifact: what is to be served.
        config: the configuration of the model's language part, as transformers has it.
        architecture: the name of the model's class.
        tensor_parallel: over how many processes heads are sharded.
    """
    expected = artifact.model
    found = config_info(
        config,
        architecture,
        name=expected.name,
        revision=expected.revision,
        weights_sha256=expected.weights_sha256,
    )
    try:
        compare(expected, found)
    except HeadwiseError as error:
        yield str(error)
    if artifact.kv_cache is not None:
        yield (
            "the artifact has a kv_cache section, and vLLM's cache serves no caches that drop tokens: "
            "leave it out (python -m artifacts merge CFG --kv-cache none --out NEW)"
        )
    section = None if artifact.decode is None else artifact.decode.omnikv
    if section is not None and section.selector != "last":
        yield f"decode.omnikv.selector is {section.selector!r}: vLLM keeps no earlier queries' scores, 'last' is served"
    if section is not None and tensor_parallel > 1:
        yield f"--tensor-parallel-size must be 1 with a decode section, got {tensor_parallel}"
    if section is not None and section.prefill_ratio is not None:
        yield f"decode.omnikv.prefill_ratio is {section.prefill_ratio}: in vLLM a chunk sees all of the past, use null"
    heads, kv_heads, size = found.num_heads, found.num_kv_heads, tensor_parallel
    if heads % size or (kv_heads % size and size % kv_heads):
        yield f"{heads} query and {kv_heads} KV heads do not divide among {size} processes (--tensor-parallel-size)"
    if getattr(config, "attention_chunk_size", None):
        yield "the model attends within chunks of the text, which vLLM serves as sequences of their own"
