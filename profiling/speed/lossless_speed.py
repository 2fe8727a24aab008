"""Times text written losslessly, by drafts and verification, beside dense decode of the same tokens by our kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from artifacts.page_layout import aligned
from profiling.progress import bar
from profiling.prompts.prompt import Prompt
from runtime import Headwise, apply_dense


@dataclass(frozen=True, kw_only=True)
class Written:
    """Of one prompt: seconds of each round, dense and lossless in turn, and what its drafts were worth.

    same: tokens before the first that differs; `tokens` where none does. margin: there, by how much dense attention
    preferred its own token, in nats; None where none differs. stats: see runtime.Handle.stats.
    """

    tokens: int
    same: int
    margin: float | None
    dense_seconds: list[float]
    lossless_seconds: list[float]
    stats: dict[str, float]


@torch.no_grad()
def measure_lossless(
    model: Any, headwise: Headwise, prompts: Sequence[Prompt], *, tokens: int, drafts: int | None, repeats: int
) -> list[Written]:
    """Write `tokens` tokens greedily after each prompt, `repeats` times each way on one cache, after an untimed round.

    drafts: see runtime.Handle.lossless. Without repeats nothing is timed: the tokens are compared.
    """
    found = []
    for prompt in bar(prompts, desc="lossless decode"):
        ids = torch.tensor([prompt.input_ids], device=model.device)
        with headwise.apply(model, strict=True) as handle:
            cache = handle.new_cache(offload="never")
            model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        took: dict[str, list[float]] = {"dense": [], "lossless": []}
        begin = ids.shape[1]
        for turn in range(repeats + 1):
            with apply_dense(model):
                dense, seconds = _write(model, ids, cache, tokens)
                took["dense"] += [seconds] if turn else []
            with headwise.apply(model, strict=True) as handle:
                mine, seconds = _write(model, ids, cache, tokens, custom_generate=handle.lossless(drafts=drafts))
                took["lossless"] += [seconds] if turn else []
                stats = handle.stats()["lossless"]
        expected, got = (text.sequences[0, begin:] for text in (dense, mine))
        same = int((expected == got).long().cumprod(0).sum())
        logits = dense.logits[min(same, tokens - 1)][0].float()
        found.append(
            Written(
                tokens=tokens,
                same=same,
                margin=None if same == tokens else (logits[expected[same]] - logits[got[same]]).item(),
                dense_seconds=took["dense"],
                lossless_seconds=took["lossless"],
                stats=stats,
            )
        )
    return found


def _write(model: Any, ids: Tensor, cache: Any, tokens: int, **how: Any) -> tuple[Any, float]:
    """What generate() writes greedily after the prompt that the cache begins with, and the seconds that it took."""
    if extra := cache.get_seq_length() - ids.shape[1] + 1:
        cache.crop(-extra)
    asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    start = time.perf_counter()
    text = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **asked, **how)
    return text, time.perf_counter() - start


def lossless_table(written: Sequence[Mapping[str, Any]]) -> str:
    """One line a prompt of `Written` as mappings, and one of all."""
    lines = [["tokens", "same", "margin", "dense ms", "lossless ms", "x dense", "a round", "accepted", "off below"]]
    for each in written:
        stats = each["stats"]
        lines.append(
            [
                *(str(each["tokens"]), str(each["same"]), "-" if each["margin"] is None else f"{each['margin']:.3f}"),
                *_speeds(each),
                f"{stats['tokens_per_round']:.2f}",
                f"{stats['accepted']}/{stats['drafted']}",
                str(stats["off_below"]),
            ]
        )
    equal = sum(each["same"] == each["tokens"] for each in written)
    table = "\n".join(aligned(lines))
    return f"{table}\ntokens equal to dense on {equal} of {len(written)} prompts"


def _speeds(each: Mapping[str, Any]) -> list[str]:
    """Milliseconds a token of both, and the median of the rounds' ratios."""
    dense, mine = each["dense_seconds"], each["lossless_seconds"]
    if not dense:
        return ["-"] * 3
    ratio = statistics.median(d / m for d, m in zip(dense, mine, strict=True))
    return [*(f"{1e3 * statistics.median(s) / each['tokens']:.1f}" for s in (dense, mine)), f"{ratio:.2f}x"]
