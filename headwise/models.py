"""Load a model of transformers by the names that the commands take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    spec: str, *, dtype: str = "auto", device: str = "auto", revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, as `--model` of the commands does.

    Args:
        spec: `smollm2` or `gemma3` (from their packages), a GGUF file (*.gguf), a local folder or
            a hub id. Code that comes with a model is never run.
        dtype: bfloat16, float16 or float32; auto is bfloat16, or float32 on a CPU without it.
        device: as torch names it: cpu, cuda, cuda:1; auto is the GPU where torch sees one.
        revision: branch, tag or commit, of a hub id only.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        HeadwiseError: the model is unknown, its package is not installed (the line has the pip
            command), or its attention cannot be reached.
    """
    from profiling.models.loading import load_model

    loaded = load_model(spec, dtype=dtype, device=device, revision=revision)
    return loaded.model, loaded.tokenizer
