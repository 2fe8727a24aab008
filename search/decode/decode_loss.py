"""The language model's loss when it decodes by some filter layers: what IndexCache's greedy search goes by.

IndexCache (arXiv 2603.12201) searches patterns of layers that choose tokens by the loss on calibration texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from artifacts import Artifact, Decode, OmniKV
from kernels.decode import MAX_QUERIES
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from profiling.similarities.layer_similarity import SimilarityConfig, continuation
from runtime import Headwise
from runtime.layers import attention_layers, sliding_layers
from search.decode.filter_layers import Choice


def decode_loss(
    config: SimilarityConfig, loaded: LoadedModel, artifact: Artifact, budget: int | float, prompts: Sequence[Prompt]
) -> Callable[[Choice], float]:
    """What says the mean -log p of the tokens that follow the prompts, decoded by a choice of filter layers, in nats.

    Each prompt is prefilled once, densely, by the first call. At most 16 tokens are decoded at once, as drafts are.
    config: as profiling.similarities.layer_similarity.resolve leaves it.
    """
    model, length = loaded.model, config.length
    modules = attention_layers(model)
    free = tuple(sorted(set(modules) - sliding_layers(modules)))
    # Caches of which any layer may filter.
    every = Headwise(_decoding(artifact, OmniKV(filter_layers=free, budget=budget)))

    @cache
    def started() -> list[tuple[Any, list[int], torch.Tensor]]:
        found = []
        for prompt in prompts:
            right = continuation(config, loaded.tokenizer, prompt)[: config.steps]
            kept = every.new_cache(model, offload="never")
            ids = torch.tensor([prompt.input_ids[:length]], device=model.device)
            found.append((kept, right, model(ids, past_key_values=kept, use_cache=True, logits_to_keep=1).logits[0]))
        return found

    @torch.no_grad()
    def loss(choice: Choice) -> float:
        section = OmniKV(filter_layers=choice.filter_layers, dense_layers=choice.dense_layers, budget=budget)
        losses, begun = [], started()
        with Headwise(_decoding(artifact, section)).apply(model, check_weights=False):
            for kept, right, first in begun:
                own, rows = copy.deepcopy(kept), [first]
                for at in range(0, len(right) - 1, MAX_QUERIES):
                    fed = torch.tensor([right[at : min(at + MAX_QUERIES, len(right) - 1)]], device=model.device)
                    rows.append(model(fed, past_key_values=own, use_cache=True).logits[0])
                targets = torch.tensor(right, device=model.device)
                losses.append(torch.nn.functional.cross_entropy(torch.cat(rows).float(), targets))
        return float(torch.stack(losses).mean())

    return loss


def _decoding(artifact: Artifact, section: OmniKV) -> Artifact:
    return artifact.model_copy(update={"decode": Decode(omnikv=section), "kv_cache": None})
