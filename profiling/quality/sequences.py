"""Prompts with their right answers as token sequences, and what attention does to the model's
predictions on them.

Shapes: S tokens of a sequence, P positions that are compared, A answers, V vocabulary.

A sequence is a context, which is prefilled under the attention in question, and what comes after it
with dense attention, as serving has it: later turns and answers, each after the right ones before
it (teacher forcing)."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan
from kernels.patterns.dense import dense_index
from profiling.inside.capture import LayerInputs, Visit, attending
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder, Ids
from profiling.quality.contexts import by_context
from profiling.quality.forced import answer_ids, asks

# Positions of a sequence that are compared; their dense log-probabilities are held in fp16.
_MOST = 256
_HELD = 1 << 25
# The kind of answers of later turns, where there are others.
_LATER = "later"
# Log-probabilities turned to fp32 at once.
_ROWS = 128
# What a model forbids altogether has a log-probability that half precision cannot hold.
LEAST = -1e4


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """What one forward pass runs over.

    ids: S of them. context: how many are prefilled; the rest attends to everything. answers:
    half-open ranges of ids that are right answers; labels: the kind of each, where there are
    several. task: as profiling.prompts.prompt.Task.name has it."""

    task: str
    ids: Ids
    context: int
    answers: tuple[tuple[int, int], ...]
    labels: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether nothing is asked: every token is text."""
        return not self.answers

    @property
    def answer_tokens(self) -> int:
        return sum(stop - start for start, stop in self.answers)

    @property
    def digest(self) -> str:
        """sha256 of the ids and of what is an answer, in hexadecimal."""
        content = [list(self.ids), self.context, [list(span) for span in self.answers]]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def sequences(prompts: Sequence[Prompt], tokenizer: Any) -> list[TokenSequence]:
    """The prompts with their right answers, those of one context in one sequence, question after
    question.

    What follows the last answer is a new line, so that the end of an answer counts as well.
    """
    after = Encoder(tokenizer)("\n")[:2]
    found = []
    for numbers in by_context(prompts):
        first = prompts[numbers[0]]
        ids = list(first.context)
        spans = list(first.scored)
        labels = list(first.labels)
        for number in numbers:
            prompt = prompts[number]
            ids += prompt.input_ids[len(prompt.context) :]
            if asks(prompt):
                right = answer_ids(tokenizer, prompt)
                spans.append((len(ids), len(ids) + len(right)))
                labels += [_LATER] if first.labels else []
                ids += [*right, *after]
        about = TokenSequence(
            task=first.task, ids=tuple(ids), context=len(first.context), answers=tuple(spans)
        )
        found.append(replace(about, labels=tuple(labels)))
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """What attention does to one sequence's predictions, beside dense attention.

    kl: (P,) KL(dense || found) in nats at positions spread over the context. nll, dense_nll: (P,)
    -log p of the tokens that follow them. Of the answers, (A,) each: their number of tokens, -log
    p, and whether every token was the likeliest."""

    kl: np.ndarray
    nll: np.ndarray
    dense_nll: np.ndarray
    answer_tokens: np.ndarray
    answer_nll: np.ndarray
    answer_dense_nll: np.ndarray
    right: np.ndarray
    dense_right: np.ndarray

    def of(self, answers: np.ndarray) -> Losses:
        """With these of the answers alone; answers: (A,) bool."""
        own = ("answer_tokens", "answer_nll", "answer_dense_nll", "right", "dense_right")
        return replace(self, **{name: getattr(self, name)[answers] for name in own})


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How near attention comes to dense attention on one sequence, whatever the right answers are.

    For lengths at which the model itself gives no right answers: what is then to be kept is what
    dense attention does.

    kl: KL(dense || found) in nats, mean over positions spread over the context. same: the share of
    these whose likeliest token is dense attention's. as_dense: the share of the answers of which
    every token is; None without any."""

    kl: float
    same: float
    as_dense: float | None


Plans = Mapping[int, LayerPlan]
"""The patterns of each layer that has some; other layers are dense."""


class _Predicted(NamedTuple):
    """log_probs: (P, V) at a sequence's positions. nll: of all tokens of its answers, one after the
    other. likeliest: the likeliest tokens at the positions, and in the places of the answers'
    tokens."""

    log_probs: Tensor
    nll: Tensor
    likeliest: Tensor


class Reference:
    """What a model predicts on sequences under dense attention by our kernel, to compare other
    attention with."""

    def __init__(
        self, model: Any, found: Sequence[TokenSequence], *, backend: str = "auto"
    ) -> None:
        """Nothing is run yet.

        Raises:
            HeadwiseError: the model computes the logits of all tokens or none.
        """
        check_logits(model)
        self.sequences = tuple(found)
        self._model = model
        self._backend = backend
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self._most = max(16, min(_MOST, _HELD // vocabulary))
        self._dense: dict[int, _Predicted] = {}

    def positions(self, number: int) -> Tensor:
        """(P,) positions of a sequence that are compared, spread over its context."""
        one = self.sequences[number]
        # The context's last token is followed by a later turn, or by an answer, which counts for
        # itself.
        spread = torch.linspace(0, one.context - 2, min(self._most, one.context - 1)).long()
        return spread.to(self._model.device)

    def know(self, number: int, log_probs: Tensor, nll: Tensor, likeliest: Tensor) -> None:
        """Take what dense attention predicts from a pass that was made anyway.

        Args:
            number: of the sequence. log_probs: (P, V) at `positions(number)`. nll, likeliest: (S -
            1,) -log p of each token but the first, and the likeliest one in its place.
        """
        before = self._before(number)
        kept = torch.cat([self.positions(number), before])
        self._dense[number] = _Predicted(log_probs.half(), nll[before], likeliest[kept])

    @property
    def known(self) -> list[str]:
        """The sequences whose dense predictions are here, by number."""
        return sorted(map(str, self._dense))

    def losses(self, number: int, plans: Plans) -> Losses:
        """Run the model over a sequence with these patterns, and compare."""
        one = self.sequences[number]
        positions = self.positions(number)
        dense = self._known(number)
        found = self._predicted(number, self._by(plans, one))
        ids = torch.tensor(one.ids, device=positions.device)
        targets = ids[positions + 1][:, None]
        answers = ids[self._before(number) + 1]
        sizes = [stop - start for start, stop in one.answers]

        def of_answers(values: Tensor, of: Callable[[Tensor], Tensor], dtype: type) -> np.ndarray:
            return np.array(
                [of(part).item() for part in values.split(sizes)] if sizes else [], dtype=dtype
            )

        return Losses(
            kl=_divergence(dense, found).cpu().numpy(),
            nll=-found.log_probs.gather(1, targets)[:, 0].cpu().numpy(),
            dense_nll=-dense.log_probs.gather(1, targets)[:, 0].float().cpu().numpy(),
            answer_tokens=np.array(sizes, dtype=np.int64),
            answer_nll=of_answers(found.nll, Tensor.sum, float),
            answer_dense_nll=of_answers(dense.nll, Tensor.sum, float),
            right=of_answers(found.likeliest[len(positions) :] == answers, Tensor.all, bool),
            dense_right=of_answers(dense.likeliest[len(positions) :] == answers, Tensor.all, bool),
        )

    def agreement(self, number: int, applied: AbstractContextManager[object]) -> Agreement:
        """Run the model over a sequence within a context that puts other attention on it, and
        compare."""
        dense = self._known(number)
        found = self._predicted(number, applied)
        # Rounded as the dense ones are held, so that the same attention differs by nothing.
        found = found._replace(log_probs=found.log_probs.half())
        same = found.likeliest == dense.likeliest
        positions = len(dense.log_probs)
        sizes = [stop - start for start, stop in self.sequences[number].answers]
        answers = [bool(part.all()) for part in same[positions:].split(sizes)] if sizes else []
        return Agreement(
            kl=float(_divergence(dense, found).mean()),
            same=float(same[:positions].float().mean()),
            as_dense=sum(answers) / len(answers) if answers else None,
        )

    def _known(self, number: int) -> _Predicted:
        """What dense attention predicts on a sequence, by a pass of its own where none was
        known."""
        if number not in self._dense:
            found = self._predicted(number, self._by({}, self.sequences[number]))
            self._dense[number] = found._replace(log_probs=found.log_probs.half())
        return self._dense[number]

    def _by(self, plans: Plans, one: TokenSequence) -> AbstractContextManager[object]:
        """A context within which the model attends by patterns, where a layer has some, and else
        densely."""
        return attending(self._model, planned(plans, one.context, backend=self._backend))

    def _before(self, number: int) -> Tensor:
        """The positions before the tokens of a sequence's answers."""
        at = [
            at
            for start, stop in self.sequences[number].answers
            for at in range(start - 1, stop - 1)
        ]
        return torch.tensor(at, dtype=torch.long, device=self._model.device)

    @torch.inference_mode()
    def _predicted(self, number: int, applied: AbstractContextManager[object]) -> _Predicted:
        one = self.sequences[number]
        spread = self.positions(number)
        before = self._before(number)
        ids = torch.tensor(one.ids, device=self._model.device)
        with applied:
            output = self._model(
                input_ids=ids[None], use_cache=False, logits_to_keep=torch.cat([spread, before])
            )
        logits, of_answers = output.logits[0].split([len(spread), len(before)])
        nll = torch.zeros(len(before), device=ids.device)
        # Answers may have many tokens: of their logits nothing is kept.
        for start in range(0, len(before), _ROWS):
            rows = slice(start, start + _ROWS)
            targets = ids[before[rows] + 1]
            some = of_answers[rows].float()
            nll[rows] = some.logsumexp(-1) - some.gather(1, targets[:, None])[:, 0]
        log_probs = logits.float().log_softmax(-1).clamp_min_(LEAST)
        return _Predicted(log_probs, nll.clamp_max_(-LEAST), output.logits[0].argmax(-1))


def _divergence(dense: _Predicted, found: _Predicted) -> Tensor:
    """KL(dense || found) in nats at each position, (P,) fp32."""
    pairs = zip(dense.log_probs.split(_ROWS), found.log_probs.split(_ROWS), strict=True)
    return torch.cat(
        [kl_divergence(rows.float(), other.float()) for rows, other in pairs]
    ).clamp_min_(0)


def kl_divergence(log_probs: Tensor, others: Tensor) -> Tensor:
    """KL(p || q) in nats of distributions over the vocabulary: (..., V) log p and log q to
    (...)."""
    return (log_probs.exp() * (log_probs - others)).sum(-1)


def planned(plans: Plans, context: int, *, backend: str = "auto") -> Visit:
    """Attention by patterns in a prefill of `context` tokens, dense in what comes after it and in
    layers without.

    Dense attention is by Headwise's kernel; layers with a window of their own are left as the model
    has them."""

    def visit(inputs: LayerInputs) -> Tensor | None:
        if inputs.sliding_window is not None:
            return None
        q = inputs.q
        k = inputs.k
        v = inputs.v
        options: dict[str, Any] = {
            "scale": inputs.scale,
            "softcap": inputs.softcap,
            "sinks": inputs.sinks,
        }
        options["backend"] = backend
        plan = plans.get(inputs.layer)
        length = q.shape[2]
        if plan is None:
            return sparse_attention(
                q, k, v, dense_index(1, q.shape[1], length, length, q.device), **options
            )
        before = slice(0, context)
        index = plan.build(q[:, :, before], k[:, :, before], scale=inputs.scale)
        out = sparse_attention(q[:, :, before], k[:, :, before], v[:, :, before], index, **options)
        if context == length:
            return out
        every = dense_index(1, q.shape[1], length - context, length, q.device)
        return torch.cat([out, sparse_attention(q[:, :, context:], k, v, every, **options)], dim=2)

    return visit


def check_logits(model: Any) -> None:
    """Raise HeadwiseError where a model computes the logits of all tokens or none."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise HeadwiseError(
            f"{type(model).__name__} has no logits_to_keep: logits of long prompts do not fit"
        )
