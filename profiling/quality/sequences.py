"""Token sequences of prompts with their answers, and losses under any attention vs dense.

A sequence is a context, which is prefilled under the attention in question, and later turns and
answers, which attend to everything, as in serving; answers are teacher-forced.

Shapes: S tokens of a sequence, P positions that are compared, A answers, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
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
from profiling.finite import not_finite
from profiling.inside.capture import LayerInputs, Visit, attending
from profiling.inside.gradients import margins
from profiling.prompts.held_out import units
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder, Ids
from profiling.quality.contexts import by_context, spread_positions
from profiling.quality.forced import answer_ids, has_answer, token_losses
from runtime.devices import execution_device

# Positions of a sequence that are compared; their dense log-probabilities are held in fp16.
_MOST = 256
# Tokens of a text whose losses are compared: their log-probabilities alone are held. 256 of them
# would add as much to the spread of a perplexity as windows differ by.
_TEXT = 2048
_HELD = 1 << 25
# Log-probabilities turned to fp32 at once.
_ROWS = 128
# Logits by which near ties are smoothed: below it a token wins by chance.
_NEAR = 0.5
# The kind of answers of later turns, where there are others.
_LATER = "later"
# Least log-probability: half precision cannot represent that of a token that a model forbids.
LEAST = -1e4


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """Tokens of one forward pass.

    Attributes:
        ids: S of them.
        context: number of first tokens that are prefilled; the rest attends to everything.
        answers: half-open ranges of ids that are right answers.
        labels: the kind of each, where there are several.
        task: as profiling.prompts.prompt.Task.name has it.
        unit: the same for sequences that are not independent; empty: of its own.
    """

    task: str
    ids: Ids
    context: int
    answers: tuple[tuple[int, int], ...]
    labels: tuple[str, ...] = ()
    unit: str = ""

    @property
    def is_text(self) -> bool:
        """True if the sequence has no question: every token is text."""
        return not self.answers

    @property
    def answer_tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(stop - start for start, stop in self.answers)

    @property
    def digest(self) -> str:
        """sha256 of the ids and answers, in hexadecimal."""
        return _digest([list(self.ids), self.context, [list(span) for span in self.answers]])


def _digest(content: Any) -> str:
    """sha256 of plain data as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def sequences(prompts: Sequence[Prompt], tokenizer: Any) -> list[TokenSequence]:
    """Join prompts with their right answers; those of one context follow each other in a sequence.

    A new line follows each answer, so that the end of an answer counts as well.
    """
    after = Encoder(tokenizer)("\n")[:2]
    joined = []
    # By content: sequences that are made later may be compared with these.
    unit_of = {at: _digest(prompts[unit[0]].context) for unit in units(prompts) for at in unit}
    for numbers in by_context(prompts):
        first = prompts[numbers[0]]
        ids = list(first.context)
        spans = list(first.scored)
        labels = list(first.labels)
        for number in numbers:
            prompt = prompts[number]
            ids += prompt.input_ids[len(prompt.context) :]
            if has_answer(prompt):
                right = answer_ids(tokenizer, prompt)
                spans.append((len(ids), len(ids) + len(right)))
                if first.labels:
                    labels.append(_LATER)
                ids += [*right, *after]
        joined.append(
            TokenSequence(
                task=first.task,
                ids=tuple(ids),
                context=len(first.context),
                answers=tuple(spans),
                labels=tuple(labels),
                unit=unit_of[numbers[0]],
            )
        )
    return joined


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """Losses of one sequence under some attention, next to those under dense attention.

    Attributes:
        kl: (P,) KL(dense || other) in nats at positions spread over the context.
        nll, dense_nll: (T,) -log p of the scored tokens: of the answers, or of a text up to 2,048
            that are spread over it.
        answer_tokens: (A,) tokens of each answer.
        answer_nll, answer_dense_nll: (A,) -log p of each answer.
        right, dense_right: (A,) True if every token of an answer was the likeliest.
        clear, dense_clear: (A,) how clearly, from 0 to 1: `right` smoothed over near ties.
    """

    kl: np.ndarray
    nll: np.ndarray
    dense_nll: np.ndarray
    answer_tokens: np.ndarray
    answer_nll: np.ndarray
    answer_dense_nll: np.ndarray
    right: np.ndarray
    dense_right: np.ndarray
    clear: np.ndarray
    dense_clear: np.ndarray

    def select(self, answers: np.ndarray) -> Losses:
        """Keep of the answers only these, (A,) bool."""
        own = (
            "answer_tokens",
            "answer_nll",
            "answer_dense_nll",
            "right",
            "dense_right",
            "clear",
            "dense_clear",
        )
        return replace(self, **{name: getattr(self, name)[answers] for name in own})


Plans = Mapping[int, LayerPlan]
"""The patterns of each layer that has some; other layers are dense."""


class _Predicted(NamedTuple):
    """Predictions on a sequence.

    Attributes:
        log_probs: (P, V) at its positions.
        nll: of all scored tokens, one after the other.
        likeliest: tokens at the positions, and in place of the scored tokens.
        margin: logit of each scored token, less the highest of the others.
    """

    log_probs: Tensor
    nll: Tensor
    likeliest: Tensor
    margin: Tensor


class Reference:
    """Predictions of a model on sequences under dense attention, which others are compared with."""

    def __init__(
        self, model: Any, sequences: Sequence[TokenSequence], *, backend: str = "auto"
    ) -> None:
        """Prepare; nothing is run yet.

        Raises:
            HeadwiseError: the model computes the logits of all tokens or none.
        """
        check_logits(model)
        self.sequences = tuple(sequences)
        self._model = model
        self._backend = backend
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self._most = max(16, min(_MOST, _HELD // vocabulary))
        self._dense: dict[int, _Predicted] = {}

    def positions(self, number: int) -> Tensor:
        """Choose the (P,) positions of a sequence that are compared, spread over its context."""
        return spread_positions(self.sequences[number].context, self._most).to(
            execution_device(self._model)
        )

    def set_dense(
        self, number: int, log_probs: Tensor, nll: Tensor, likeliest: Tensor, margin: Tensor
    ) -> None:
        """Take dense attention's predictions from a pass that was made anyway.

        Args:
            number: of the sequence.
            log_probs: (P, V) at `positions(number)`.
            nll: (S - 1,) -log p of each token but the first.
            likeliest: (S - 1,) the likeliest token in place of each token but the first.
            margin: (S - 1,) the token's logit, less the highest of the others.
        """
        before = self._before_scored(number)
        positions = torch.cat([self.positions(number), before])
        self._dense[number] = _Predicted(
            log_probs.half(), nll[before], likeliest[positions], margin[before]
        )

    def losses(self, number: int, plans: Plans) -> Losses:
        """Run the model over a sequence with these patterns, and compare with dense attention.

        Raises:
            HeadwiseError: a loss is not finite.
        """
        sequence = self.sequences[number]
        positions = self.positions(number)
        dense = self._dense_predicted(number)
        other = self._predicted(number, self._attending(plans, sequence))
        ids = torch.tensor(sequence.ids, device=positions.device, dtype=torch.long)
        answers = ids[self._before_scored(number) + 1]
        sizes = [stop - start for start, stop in sequence.answers]
        right = other.likeliest[len(positions) :] == answers
        dense_right = dense.likeliest[len(positions) :] == answers
        losses = Losses(
            kl=_divergence(dense, other).cpu().numpy(),
            nll=other.nll.cpu().numpy(),
            dense_nll=dense.nll.cpu().numpy(),
            answer_tokens=np.array(sizes, dtype=np.int64),
            answer_nll=np.array([float(each.sum()) for each in _split(other.nll, sizes)]),
            answer_dense_nll=np.array([float(each.sum()) for each in _split(dense.nll, sizes)]),
            right=np.array([bool(each.all()) for each in _split(right, sizes)], dtype=bool),
            dense_right=np.array([bool(e.all()) for e in _split(dense_right, sizes)], dtype=bool),
            clear=_clear(other.margin, sizes),
            dense_clear=_clear(dense.margin, sizes),
        )
        self._check(number, {}, losses.dense_nll, losses.answer_dense_nll)
        self._check(number, plans, losses.kl, losses.nll, losses.answer_nll)
        return losses

    def _check(self, number: int, plans: Plans, *losses: np.ndarray) -> None:
        """Raise HeadwiseError, with the task and the first head or layer, if one is not finite."""
        if all(np.isfinite(each).all() for each in losses):
            return
        sequence = self.sequences[number]
        attend = planned(plans, sequence.context, backend=self._backend)
        faults: list[str] = []

        def visit(inputs: LayerInputs) -> Tensor | None:
            out = attend(inputs)
            if faults:
                return out
            if not all(bool(each.isfinite().all()) for each in (inputs.q, inputs.k, inputs.v)):
                faults.append(f"the input of layer {inputs.layer}")
            elif out is not None and not bool(out.isfinite().all()):
                head = int((~out.isfinite()).flatten(2).any(-1)[0].int().argmax())
                faults.append(f"head {inputs.layer}.{head}")
            return out

        self._predicted(number, attending(self._model, visit))
        who = "the patterns" if plans else "dense attention"
        where = faults[0] if faults else "the logits"
        raise not_finite(f"{sequence.task}: losses of {who} are", self._model, where)

    def _dense_predicted(self, number: int) -> _Predicted:
        """Return dense attention's predictions on a sequence; compute them if not cached."""
        if number not in self._dense:
            predicted = self._predicted(number, self._attending({}, self.sequences[number]))
            self._dense[number] = predicted._replace(log_probs=predicted.log_probs.half())
        return self._dense[number]

    def _attending(self, plans: Plans, sequence: TokenSequence) -> AbstractContextManager[object]:
        return attending(self._model, planned(plans, sequence.context, backend=self._backend))

    def _before_scored(self, number: int) -> Tensor:
        """The positions before the tokens of a sequence's answers, or before those of a text."""
        sequence = self.sequences[number]
        device = execution_device(self._model)
        if sequence.is_text:
            return spread_positions(sequence.context, _TEXT).to(device)
        positions = [at for start, stop in sequence.answers for at in range(start - 1, stop - 1)]
        return torch.tensor(positions, dtype=torch.long, device=device)

    @torch.inference_mode()
    def _predicted(self, number: int, applied: AbstractContextManager[object]) -> _Predicted:
        ids = torch.tensor(
            self.sequences[number].ids, device=execution_device(self._model), dtype=torch.long
        )
        spread = self.positions(number)
        before = self._before_scored(number)
        positions = torch.cat([spread, before])
        with applied:
            output = self._model(input_ids=ids[None], use_cache=False, logits_to_keep=positions)
        logits, of_scored = output.logits[0].split([len(spread), len(before)])
        targets = ids[before + 1]
        nll = token_losses(of_scored, targets).clamp_max_(-LEAST)
        if self.sequences[number].is_text:
            # Only answers are right or wrong.
            margin = torch.zeros_like(nll)
        else:
            margin = margins(of_scored, targets)
        return _Predicted(log_probabilities(logits), nll, output.logits[0].argmax(-1), margin)


def _clear(margin: Tensor, sizes: list[int]) -> np.ndarray:
    """Smooth the correctness of answers: the product of Phi(margin / _NEAR) over their tokens."""
    clear = torch.special.ndtr(margin.double() / _NEAR)
    return np.array([float(each.prod()) for each in _split(clear, sizes)], dtype=np.float64)


def _split(values: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Values of each answer; empty without answers."""
    if sizes:
        return values.split(sizes)
    return ()


def _divergence(dense: _Predicted, other: _Predicted) -> Tensor:
    """Compute KL(dense || other) in nats at each position, (P,) fp32."""
    pairs = zip(dense.log_probs.split(_ROWS), other.log_probs.split(_ROWS), strict=True)
    rows = [kl_divergence(expected.float(), actual.float()) for expected, actual in pairs]
    return torch.cat(rows).clamp_min_(0)


def log_probabilities(logits: Tensor) -> Tensor:
    """Compute log p (..., V) in fp32; a token that a model forbids has LEAST."""
    return logits.float().log_softmax(-1).clamp_min_(LEAST)


def kl_divergence(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Compute KL(p || q) in nats from (..., V) log p and log q: (...)."""
    return (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)


def planned(plans: Plans, context: int, *, backend: str = "auto") -> Visit:
    """Attend by patterns to a context, densely after it and in layers without patterns.

    Dense attention is by Headwise's kernel; sliding-window layers are left as the model has them.
    """

    def attend(inputs: LayerInputs, queries: slice, keys: slice, plan: LayerPlan | None) -> Tensor:
        q = inputs.q[:, :, queries]
        k = inputs.k[:, :, keys]
        if plan is None:
            index = dense_index(1, q.shape[1], q.shape[2], k.shape[2], q.device)
        else:
            index = plan.build(q, k, scale=inputs.scale)
        out: Tensor = sparse_attention(
            q,
            k,
            inputs.v[:, :, keys],
            index,
            logits=inputs.logits,
            backend=backend,
        )
        return out

    def visit(inputs: LayerInputs) -> Tensor | None:
        if inputs.sliding_window is not None:
            return None
        everything = slice(None)
        plan = plans.get(inputs.layer)
        if plan is None or context == inputs.q.shape[2]:
            return attend(inputs, everything, everything, plan)
        before = attend(inputs, slice(context), slice(context), plan)
        after = attend(inputs, slice(context, None), everything, None)
        return torch.cat([before, after], dim=2)

    return visit


def check_logits(model: Any) -> None:
    """Raise HeadwiseError where a model computes the logits of all tokens or none."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise HeadwiseError(
            f"{type(model).__name__} has no logits_to_keep: logits of long prompts do not fit"
        )
