"""The loop of `generate(custom_generate=handle.lossless())`: draft, verify, keep what stands.

Shapes: N drafted tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from artifacts import Artifact, HeadwiseError
from runtime.attention.state import Settings, settings_of
from runtime.layers import text_config
from runtime.lossless.pace import MOST, Pace
from runtime.lossless.run import Run
from runtime.measured import wait
from runtime.new_cache import make_cache
from runtime.omnikv.rounds import Round


class Lossless:
    """What `generate` calls in place of its own loop. See runtime.Handle.lossless.

    transformers hands such a loop no streamer.
    """

    def __init__(self, artifact: Artifact | None, model: Any, settings: Settings, drafts: int | None) -> None:
        if artifact is None or settings.decode is None:
            raise HeadwiseError("lossless decode needs a decode section: python -m search.filters writes one")
        if artifact.kv_cache is not None:
            raise HeadwiseError("lossless decode needs every token, and the kv_cache section drops some")
        if drafts is not None and not (type(drafts) is int and 0 <= drafts <= MOST):
            raise HeadwiseError(f"drafts must be None or a whole number of 0 to {MOST}, got {drafts!r}")
        if drafts is None and settings.decode.group is not None:
            raise HeadwiseError("lossless decode over several processes needs drafts=N: their clocks differ")
        self._artifact, self._model, self._decode = artifact, model, settings.decode
        self._pace = Pace(drafts)
        self._counts: Counter[str] = Counter()

    def stats(self) -> dict[str, float]:
        """See runtime.Handle.stats."""
        rounds, accepted = self._counts["rounds"], self._counts["accepted"]
        return {
            **{name: self._counts[name] for name in ("rounds", "drafted", "accepted", "dense_steps")},
            "tokens_per_round": accepted / rounds + 1 if rounds else 0.0,
            "off_below": self._pace.off_below,
        }

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Generate one sequence as `generate` does, greedily or by sampling; input_ids (1, n).

        Raises:
            HeadwiseError: a batch, beams, a cache that has not every token at hand, outputs that are not kept, or
                another model.
        """
        self._check(model, input_ids, generation_config, model_kwargs)
        run = Run(model, logits_processor, generation_config, model_kwargs)
        served, ids = Round(self._decode), input_ids
        self._pace.begin()
        with served.at_work():
            found, plan, seconds = run.prefill(ids), None, (0.0, 0.0)
            drafted, drafts = ids[0, :0], found[:0]
            while True:
                new = standing(drafted, drafts if run.samples else None, found)
                if plan is not None:
                    stood = len(new) - 1
                    self._pace.saw(plan, stood, *seconds)
                    drafting = {"rounds": 1, "drafted": plan.drafts, "accepted": stood}
                    self._counts.update(drafting if plan.drafts else {"dense_steps": 1})
                before, done = ids.shape[1], False
                for token in new:
                    ids = torch.cat([ids, token.view(1, 1)], dim=1)
                    done = bool(stopping_criteria(ids, None).all())
                    if done:
                        break
                run.keep(ids.shape[1] - before)
                if done:
                    return run.output(ids)
                # Verification adds a token of its own.
                plan = self._pace.plan(ids.shape[1], generation_config.max_length - ids.shape[1] - 1)
                served.drafting = True
                start = time.perf_counter()
                drafted, drafts = run.draft(ids, plan.drafts)
                wait(ids.device)
                middle = time.perf_counter()
                served.drafting, served.chooses = False, plan.chooses
                found = run.verify(ids, drafted)
                wait(ids.device)
                seconds = middle - start, time.perf_counter() - middle

    def _check(self, model: Any, ids: Tensor, config: Any, given: dict[str, Any]) -> None:
        """Refuse what cannot be served, by name; in the place of the empty cache that generate() made, put ours."""
        if model is not self._model:
            raise HeadwiseError("lossless decode is for the model that its artifact is applied to, and this is another")
        if settings_of(text_config(model)) is None:
            raise HeadwiseError("this artifact is no longer applied: its handle was undone")
        if ids.shape[0] != 1 or config.num_beams != 1:
            raise HeadwiseError(
                "lossless decode serves one sequence at a time, without beams: "
                f"got a batch of {ids.shape[0]} and num_beams={config.num_beams}"
            )
        if not given.get("use_cache", True):
            raise HeadwiseError("lossless decode needs use_cache=True")
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name, False):
                raise HeadwiseError(f"lossless decode does not keep what {name}=True asks for")
        from transformers import DynamicCache

        cache = given["past_key_values"]
        if type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False):
            cache = given["past_key_values"] = make_cache(self._artifact, model, "never")
        if any(hasattr(layer, "group") or hasattr(layer, "policies") for layer in cache.layers):
            raise HeadwiseError("lossless decode needs a cache with all tokens at hand: new_cache(offload='never')")


def standing(drafted: Tensor, drafts: Tensor | None, scores: Tensor) -> Tensor:
    """The drafted tokens that stand, and one more by the verifying scores: (n + 1,) int64 of n <= N that stand.

    Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1): what comes out is what dense attention
    would have written, or has the distribution of its scores, whatever drafted.

    Args:
        drafted: (N,) tokens; the i-th was drawn from softmax(drafts[i]).
        drafts: (N, V) scores that they were drawn by, after every processor; None where decoding is greedy.
        scores: (N + 1, V) those of dense attention, after every processor: row i follows i drafted tokens.
    """
    if drafts is None:
        best = scores.argmax(-1)
        return best[: _leading(best[:-1] == drafted) + 1]
    q, p = drafts.softmax(-1), scores.softmax(-1)
    at = torch.arange(len(drafted), device=drafted.device)
    count = _leading(torch.rand(len(drafted), device=p.device) * q[at, drafted] < p[at, drafted])
    last = p[count]
    if count < len(drafted):
        # What the draft gave too much of was refused; what it gave too little of is left.
        rest = (last - q[count]).clamp_(min=0)
        last = rest if rest.sum() > 0 else last
    return torch.cat([drafted[:count], torch.multinomial(last, 1)])


def _leading(right: Tensor) -> int:
    """How many come before the first that is wrong."""
    return int(right.long().cumprod(0).sum())
