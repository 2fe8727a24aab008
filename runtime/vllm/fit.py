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
    for section, what in (("decode", "OmniKV's decode"), ("kv_cache", "caches that drop tokens")):
        if getattr(artifact, section) is not None:
            flag = section.replace("_", "-")
            yield (
                f"the artifact has a {section} section, and vLLM's cache serves no {what}: "
                f"leave it out (python -m artifacts merge CFG --{flag} none --out NEW)"
            )
    heads, kv_heads, size = found.num_heads, found.num_kv_heads, tensor_parallel
    if heads % size or (kv_heads % size and size % kv_heads):
        yield f"{heads} query and {kv_heads} KV heads do not divide among {size} processes (--tensor-parallel-size)"
    if getattr(config, "attention_chunk_size", None):
        yield "the model attends within chunks of the text, which vLLM serves as sequences of their own"
