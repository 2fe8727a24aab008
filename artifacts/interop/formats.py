"""The formats of other tools that are read and written, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, one_line
from artifacts.interop import (
    duo_attention,
    kascade,
    kvzip,
    layers,
    modelopt,
    read_heads,
    write_heads,
)
from artifacts.interop.report import Export, Import
from artifacts.interop.shape import Given
from artifacts.interop.source import Source

if TYPE_CHECKING:
    from artifacts.schema.artifact import Artifact
    from artifacts.store.sidecar import Array

Write = Callable[["Artifact", Mapping[str, "Array"], Path], Export]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format.

    Attributes:
        about: description for the help.
        options: fields of Given that `read` heeds beside the model.
        patterns: it is about heads' patterns in prefill, so that recall can be measured.
    """

    about: str
    write: Write
    read: Callable[[Source, Given], Import]
    options: tuple[str, ...] = ()
    patterns: bool = False


_HEADS = ("dense_below", "dense_tail")
_KV_HEADS = ("sinks", "window", "threshold", "sparsity")
FORMATS: dict[str, Format] = {
    "minference": Format(
        about="MInference's JSON list of head patterns, also within AngelSlim's best_pattern",
        read=partial(read_heads.read, format="minference"),
        write=partial(write_heads.write, format="minference"),
        options=_HEADS,
        patterns=True,
    ),
    "sparse_attention_config": Format(
        about="the same list for vLLM and SGLang: sparse_attention_config.json",
        read=partial(read_heads.read, format="sparse_attention_config"),
        write=partial(write_heads.write, format="sparse_attention_config"),
        options=_HEADS,
        patterns=True,
    ),
    "modelopt": Format(
        about="ModelOpt's sparse_attention_config, alone or in config.json",
        read=modelopt.read,
        write=modelopt.write,
        options=_HEADS,
        patterns=True,
    ),
    "duo_attention": Format(
        about="DuoAttention's full_attention_heads.tsv, its config.json beside it",
        read=duo_attention.read,
        write=duo_attention.write,
        options=_KV_HEADS,
    ),
    "kvzip": Format(
        about="KVzip's head scores, a .pt file",
        read=kvzip.read,
        write=kvzip.write,
        options=_KV_HEADS,
    ),
    "index_topk_pattern": Format(
        about="FFSSFS...: config.json of transformers, vLLM, SGLang, TensorRT-LLM",
        read=layers.read_index_pattern,
        write=layers.write_index_pattern,
    ),
    "sparse_vllm": Format(
        about="Sparse-vLLM's full_attention_layers, a flat JSON of its options",
        read=layers.read_sparse_vllm,
        write=layers.write_sparse_vllm,
    ),
    "kascade": Format(
        about="Kascade's anchor layers, MODEL_layers_0_2_8.npy",
        read=kascade.read,
        write=kascade.write,
    ),
}


def guess(file: Path) -> str:
    """The format of a file, by its name.

    Raises:
        ArtifactError: it is an artifact by its name.
    """
    if file.suffix in (".yaml", ".yml"):
        raise ArtifactError(
            f"{one_line(str(file))}: is an artifact by its name: say with --to what to write from "
            f"it"
        )
    by_suffix = {".tsv": "duo_attention", ".pt": "kvzip", ".npy": "kascade"}
    by_name = {
        "sparse_attention_config.json": "sparse_attention_config",
        "selected_full_layers.json": "sparse_vllm",
        "config.json": "index_topk_pattern",
    }
    return by_suffix.get(file.suffix) or by_name.get(file.name) or "minference"
