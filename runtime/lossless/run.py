"""One sequence on its way through a model: prefill, drafts, verification, and what is taken back of its cache.

Shapes: n tokens so far, N drafted tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Run:
    """The forwards of one generation. Its cache holds all tokens but the newest, which the next forward takes in."""

    def __init__(self, model: Any, logits_processor: Any, generation_config: Any, given: dict[str, Any]) -> None:
        self.model, self._config, self._given = model, generation_config, given
        self._process = logits_processor
        self.samples: bool = generation_config.do_sample
        # Tokens that the latest forward took in: keep() says how many of them stay.
        self._open = 0
        # Of the latest verification, and of the tokens that were kept: scores as processed and as the model gave them.
        self._rows: tuple[Tensor, Tensor] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    @property
    def cache(self) -> Any:
        return self._given["past_key_values"]

    def prefill(self, ids: Tensor) -> Tensor:
        """Scores (1, V) of the token after a prompt (1, n)."""
        logits = self.model._prefill(ids, self._config, self._given).logits[0, -1:]
        # Layers that slide keep what drafts push out only where they are told to, and not during the prefill.
        self.cache.activate_past_recording()
        # keep() takes the newest token as one that a forward took in.
        self._open = 1
        return self._scores(ids, logits)

    def draft(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """N drafted tokens (N,) after tokens (1, n), and the scores (N, V) that they were drawn by."""
        rows = [self._rows[0][:0]] if self._rows is not None else []
        for done in range(count):
            scores = self._scores(ids, self._forward(ids, 1, done))
            token = torch.multinomial(scores.softmax(-1), 1) if self.samples else scores.argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], dim=1)
            rows.append(scores)
        self.cache.crop(-count)
        return ids[0, ids.shape[1] - count :], torch.cat(rows)

    def verify(self, ids: Tensor, drafted: Tensor) -> Tensor:
        """Scores (N + 1, V) of the token after each of the newest of (1, n) and N drafted tokens."""
        ids, self._open = torch.cat([ids, drafted[None]], dim=1), len(drafted) + 1
        return self._scores(ids, self._forward(ids, self._open, len(drafted)))

    def keep(self, count: int) -> None:
        """So many new tokens stay: the last of them is for the next forward, the cache forgets what was not kept."""
        self.cache.crop(count - self._open)
        self._given = self.model._update_model_kwargs_for_generation({}, self._given, num_new_tokens=count)
        if self._config.return_dict_in_generate:
            assert self._rows is not None
            self._kept += [(scores[None], logits[None]) for scores, logits in zip(*self._rows, strict=True)][:count]

    def output(self, ids: Tensor) -> Any:
        """What generate() returns, as asked for."""
        if not self._config.return_dict_in_generate:
            return ids
        from transformers.generation import GenerateDecoderOnlyOutput

        scores, logits = zip(*self._kept, strict=True)
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=scores if self._config.output_scores else None,
            logits=logits if self._config.output_logits else None,
            past_key_values=self.cache,
        )

    def _forward(self, ids: Tensor, count: int, beyond: int) -> Tensor:
        """Logits (count, V) of the last `count` of tokens (1, n), `beyond` of which are drafts."""
        given = dict(self._given)
        if beyond:
            given = self.model._update_model_kwargs_for_generation({}, given, num_new_tokens=beyond)
        if "logits_to_keep" in given:
            given["logits_to_keep"] = count
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=count, **given)
        logits: Tensor = self.model(**inputs, return_dict=True).logits[0, -count:]
        return logits

    def _scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Scores (count, V) fp32 after every processor, of the tokens after each of the last `count` of (1, n)."""
        count, logits = len(logits), logits.to(ids.device, torch.float32)
        first = ids.shape[1] - count + 1
        # A processor may write into what it gets.
        rows = [self._process(ids[:, : first + at], logits[at : at + 1].clone()) for at in range(count)]
        scores = torch.cat(rows)
        self._rows = scores, logits
        return scores
