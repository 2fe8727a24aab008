"""Conformance of cache policies: all of runtime.caches.make go through every test here."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from artifacts import H2O, Full, HeadwiseError, SnapKV, Streaming
from kernels.logits import Logits
from runtime import memory_report
from runtime.caches.make import POLICIES
from runtime.caches.step import Step
from tests.conformance.policy_definitions import DEFINITIONS, defined
from tests.runtime.batches import chunks_of, fed, real_from
from tests.runtime.conftest import _torch, artifact_for, build, ids, keeping, short_turns

__all__ = ["_torch", "artifact_for", "build", "ids", "keeping", "short_turns"]

CLOSE: dict[str, Any] = {"atol": 3e-4, "rtol": 1e-3}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
N = 56


@dataclass(frozen=True)
class Case:
    """A policy with its sizes. sliding: the model's own window; the record is then that of its
    other layers."""

    record: Any
    sliding: int | None = None

    @property
    def rule(self) -> Any:
        """Record of the policy of the layers."""
        if self.sliding:
            return Streaming(sinks=0, window=self.sliding, positions="original")
        return self.record

    @property
    def crops(self) -> bool:
        """True if 12 tokens that come one by one can be taken back."""
        return not isinstance(self.record, H2O)

    @property
    def by_token(self) -> bool:
        """True if it keeps the same tokens whatever calls they come in."""
        kind = self.record.kind
        return kind in ("full", "streaming") or (kind == "h2o" and self.record.eviction == "greedy")

    def __str__(self) -> str:
        if self.sliding:
            return f"rolling-{self.sliding}"
        sizes = self.record.model_dump(exclude={"kind"})
        return "-".join([self.record.kind, *map(str, sizes.values())])

    def build(self, build: Callable[..., Any], **changes: Any) -> Any:
        """A random model of one layer whose cache the policy can hold.

        tests/runtime/caches tests several layers with different policies."""
        changes["num_hidden_layers"] = 1
        if self.sliding:
            return build("Mistral", head_dim=64, sliding_window=self.sliding, **changes)
        return build(**changes)


# One of each sort, which goes through every test; a budget that is a count is 16 tokens.
CASES = [
    Case(Full()),
    Case(Streaming(sinks=4, window=12)),
    Case(Streaming(sinks=4, window=12, positions="original")),
    Case(Full(), sliding=16),
    Case(H2O(heavy=6, recent=10)),
    Case(H2O(heavy=0.2, recent=0.1)),
    Case(H2O(heavy=6, recent=10, eviction="greedy")),
    Case(SnapKV(budget=16, window=8, pool=5)),
]
# Sizes at the edges, which are compared with the definition.
EDGES = [
    Case(Streaming(sinks=1, window=1)),
    Case(Streaming(sinks=0, window=9)),
    Case(Streaming(sinks=3, window=40)),
    Case(H2O(heavy=0.15, recent=7, normalised=True)),
    Case(H2O(heavy=9, recent=0)),
    Case(H2O(heavy=0, recent=0.25)),
    Case(H2O(heavy=0.2, recent=0.1, eviction="greedy", normalised=True)),
    Case(SnapKV(budget=0.4, window=8, pool=7)),
    Case(SnapKV(budget=20, window=19, pool=1)),
    Case(SnapKV(budget=0.05, window=16, pool=3)),
    Case(SnapKV(budget=12, window=1, pool=3)),
    Case(SnapKV(budget=500, window=8, pool=5)),
]
DROPPING = CASES[1:]
every_policy = pytest.mark.parametrize("case", CASES, ids=str)
policies_that_drop = pytest.mark.parametrize("case", DROPPING, ids=str)


def test_every_policy_has_a_case():
    assert {case.record.kind for case in CASES} == set(POLICIES) == set(DEFINITIONS)


def layers_under(case: Case, cache: Any) -> list[Any]:
    """Layers of a cache that are under the case's policy."""
    return [layer for layer in cache.layers if layer.is_sliding == bool(case.sliding)]


def assert_holds(cache: Any, layers: list[Any]) -> None:
    """Assert that a cache holds these values, [layer][batch][KV head] (n, E), in any order."""
    for layer, sequences in zip(cache.layers, layers, strict=True):
        (policy,) = layer.policies
        for row, heads in enumerate(sequences):
            for head, expected in enumerate(heads):
                held = policy.values[row, head, : policy.cached[row]]
                assert len(held) == len(expected)
                held = held[held[:, 0].argsort()]
                torch.testing.assert_close(held, expected[expected[:, 0].argsort()], **CLOSE)


# Two prompts, steps, turns shorter than and as long as SnapKV's window, and drafts.
MIXED = (17, 20, 1, 1, 5, 8, 3)
# Chunks, and query and KV heads: query heads of a KV head share its tokens.
SHAPES = [((1,), (4, 2)), (MIXED, (8, 2)), ((33, 1), (4, 1)), ((N,), (4, 4))]


@pytest.mark.parametrize(
    ("case", "sizes", "heads"),
    [
        *((case, *shape) for case in CASES for shape in SHAPES),
        *((case, MIXED, (4, 2)) for case in EDGES),
    ],
    ids=str,
)
def test_policy_attention_and_memory_equal_definition(case, sizes, heads, build, keeping, ids):
    model = case.build(build, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    tokens = ids(N, batch=2)
    with defined(model, case.rule, sizes) as layers:
        expected = model(tokens, use_cache=False).logits
    with keeping(model, case.record).apply(model) as handle:
        cache = handle.new_cache()
        torch.testing.assert_close(fed(model, tokens, sizes, cache), expected, **CLOSE)
        assert_holds(cache, layers)
        assert [layer.seen for layer in memory_report(cache).layers] == [N]
        # A cache that was reset starts empty.
        cache.reset()
        assert cache.get_seq_length() == 0
        again = fed(model, tokens[:, :20], sizes, cache)
    if case.by_token or chunks_of(20, sizes) == chunks_of(N, sizes)[:1]:
        torch.testing.assert_close(again, expected[:, :20], **CLOSE)


@every_policy
def test_policy_batch_of_different_lengths_equals_each_sequence(case, build, keeping, ids):
    model = case.build(build)
    prompts = [ids(n, seed=seed)[0] for seed, n in enumerate((40, 40, 17, 5, 1))]
    tokens = torch.zeros(len(prompts), 40, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = prompt
    real = real_from(40, *(40 - len(prompt) for prompt in prompts))
    options = {"max_new_tokens": 18, **GREEDY}
    with keeping(model, case.record).apply(model) as handle:
        alone = []
        for prompt in prompts:
            out = model.generate(prompt[None], past_key_values=handle.new_cache(), **options)
            alone.append(out[0, len(prompt) :])
        cache = handle.new_cache()
        batch = model.generate(tokens, attention_mask=real, past_key_values=cache, **options)
        # A step serves them together.
        assert all(len(layer.policies) == 1 for layer in layers_under(case, cache))
    assert torch.equal(batch[:, 40:], torch.stack(alone))


@every_policy
def test_policy_beam_scores_equal_single_sequence(case, build, keeping, ids):
    model = case.build(build)
    prompt = ids(30)
    with keeping(model, case.record).apply(model) as handle:
        out = model.generate(
            prompt,
            past_key_values=handle.new_cache(),
            max_new_tokens=16,
            num_beams=3,
            output_scores=True,
            return_dict_in_generate=True,
            **GREEDY,
        )
        again = fed(model, out.sequences, (30, 1), handle.new_cache())
    logs = again.log_softmax(-1)[0, 29:-1].gather(1, out.sequences[0, 30:, None]).sum()
    torch.testing.assert_close(out.sequences_scores[0] * 16, logs, atol=1e-3, rtol=1e-3)


@every_policy
def test_policy_crop_removes_tokens_or_is_rejected(case, build, keeping, ids):
    model = case.build(build)
    tokens = ids(12)
    other = ids(15, seed=1)
    after = torch.cat([tokens[:, :7], other], dim=1)
    with keeping(model, case.record).apply(model) as handle:
        expected = fed(model, after, (1,), handle.new_cache())
        cache = handle.new_cache()
        fed(model, tokens, (1,), cache)
        assert all(layer.is_croppable == case.crops for layer in layers_under(case, cache))
        if case.crops:
            cache.crop(-5)
            assert cache.get_seq_length() == 7
            logits = fed(model, other, (1,), cache)
            torch.testing.assert_close(logits, expected[:, 7:], **CLOSE)
        else:
            with pytest.raises(HeadwiseError, match="cannot take 5 tokens back"):
                cache.crop(-5)
        cache.crop(-cache.get_seq_length())
        torch.testing.assert_close(fed(model, after, (1,), cache), expected, **CLOSE)


@policies_that_drop
def test_policy_crop_after_eviction_is_rejected(case, build, keeping, ids):
    model = case.build(build)
    tokens = ids(17)
    with keeping(model, case.record).apply(model) as handle:
        expected = fed(
            model, torch.cat([tokens, tokens[:, :3]], dim=1), (17, 1), handle.new_cache()
        )
        cache = handle.new_cache()
        fed(model, tokens, (17,), cache)
        assert not any(layer.is_croppable for layer in layers_under(case, cache))
        with pytest.raises(
            HeadwiseError, match=r"cannot take 1 tokens back: .* dropped others since"
        ):
            layers_under(case, cache)[0].crop(-1)
        logits = fed(model, tokens[:, :3], (1,), cache)
        torch.testing.assert_close(logits, expected[:, 17:], **CLOSE)


@every_policy
def test_policy_crop_of_last_call_works_while_past_states_are_recorded(case, build, keeping, ids):
    """As in assisted decoding: drafts after the prompt, then after a token."""
    model = case.build(build)
    tokens = ids(60)
    drafts = ids(6, seed=1)
    with keeping(model, case.record).apply(model) as handle:
        expected = fed(model, tokens, (40, 2, 1, 5, 1), handle.new_cache())
        cache = handle.new_cache()
        cache.activate_past_recording()
        results = []
        for begin, end, wrong in ((0, 40, 6), (40, 42, 3), (42, 43, 5), (43, 48, 0), (48, 49, 1)):
            inputs = torch.cat([tokens[:, begin:end], drafts[:, :wrong]], dim=1)
            logits = model(inputs, past_key_values=cache).logits
            results.append(logits[:, : end - begin])
            assert cache.layers[0].is_croppable
            cache.crop(-wrong)
            assert cache.get_seq_length() == end
        # Tokens that were not cropped remain.
        results.append(fed(model, tokens[:, 49:], (1,), cache))
    torch.testing.assert_close(torch.cat(results, dim=1), expected, **CLOSE)


@every_policy
def test_policy_crop_of_padded_batch_removes_drafts(case, build, keeping, ids):
    model = case.build(build)
    tokens = ids(40, batch=3)
    real = real_from(40, 0, 11, 30)
    with keeping(model, case.record).apply(model) as handle:
        expected = fed(model, tokens, (30, 1, 2, 1), handle.new_cache(), attention_mask=real)
        cache = handle.new_cache()
        # A step joins the sequences, and drafts split them again by their lengths.
        fed(model, tokens[:, :31], (30, 1), cache, attention_mask=real[:, :31])
        cache.activate_past_recording()
        drafted = torch.cat([tokens[:, :33], ids(3, batch=3, seed=1)], dim=1)
        mask = torch.cat([real[:, :33], torch.ones(3, 3, dtype=torch.long)], dim=1)
        fed(model, drafted[:, 31:], (5,), cache, attention_mask=mask)
        cache.crop(-3)
        logits = fed(model, tokens[:, 33:], (1,), cache, attention_mask=real)
    torch.testing.assert_close(logits, expected[:, 33:], **CLOSE)


@pytest.mark.parametrize("drafting", ["prompt lookup", "assistant"])
@every_policy
def test_assisted_decoding_verifies_drafts_in_calls_of_the_accepted_tokens(
    case, drafting, build, keeping, ids
):
    model = case.build(build)
    prompt = ids(10).repeat(1, 4)
    more: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if drafting == "assistant":
        more = {"assistant_model": build(num_hidden_layers=1, seed=1)}
    options = {"max_new_tokens": 20, **GREEDY}
    sizes: list[int] = []
    with keeping(model, case.record).apply(model) as handle:
        cache = handle.new_cache()
        crop = cache.crop

        def counted(count: int) -> None:
            crop(count)
            sizes.append(cache.get_seq_length() - sum(sizes))

        cache.crop = counted
        out = model.generate(prompt, past_key_values=cache, **more, **options)
        assert out.shape[1] == 60 and sum(sizes) == 59
        again = fed(model, out[:, :-1], sizes, handle.new_cache())
        assert torch.equal(again[:, 39:].argmax(-1), out[:, 40:])
        if case.by_token:
            plain = model.generate(prompt, past_key_values=handle.new_cache(), **options)
            assert torch.equal(out, plain)


@every_policy
def test_policy_copy_and_inference_mode_cache_are_independent(case, build, keeping, ids):
    model = case.build(build)
    tokens = ids(44)
    other_tokens = torch.cat([tokens[:, :40], ids(3, seed=1)], dim=1)
    with keeping(model, case.record).apply(model) as handle:
        expected = fed(model, tokens, (30, 1), handle.new_cache())
        alone = fed(model, other_tokens, (30, 1), handle.new_cache())
        cache = handle.new_cache()
        with torch.inference_mode():
            fed(model, tokens[:, :40], (30, 1), cache)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        of_former = fed(model, other_tokens[:, 40:], (1,), cache)
        torch.testing.assert_close(of_former, alone[:, 40:], **CLOSE)
        for each in copies:
            logits = fed(model, tokens[:, 40:], (1,), each)
            torch.testing.assert_close(logits, expected[:, 40:], **CLOSE)


@pytest.mark.parametrize(
    ("case", "mine"), [(CASES[0], 0), *((case, 1) for case in CASES if not case.sliding)], ids=str
)
def test_policy_kv_head_equals_separate_layer(case, mine, build, keeping, ids):
    model = build(num_hidden_layers=1)
    tokens = ids(60, batch=2)
    other = Streaming(sinks=2, window=9, positions="original")
    names = ["other", "other"]
    names[mine] = "case"
    alone, _ = heads_of(model, keeping(model, case.record), tokens)
    found, cache = heads_of(
        model, keeping(model, {"other": other, "case": case.record}, rows=[tuple(names)]), tokens
    )
    # Two query heads share each KV head.
    served = slice(2 * mine, 2 * mine + 2)
    torch.testing.assert_close(found[:, :, served], alone[:, :, served], **CLOSE)
    retained = [policy.cached[0] for policy in cache.layers[0].policies]
    assert memory_report(cache).layers[0].mean_cached == sum(retained) / 2


def heads_of(model: Any, headwise: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    """Outputs (B, n, H, D) of the heads of the only layer, in chunks and one by one; the cache."""
    outs: list[Tensor] = []
    module = model.model.layers[0].self_attn.o_proj
    with headwise.apply(model) as handle:
        cache = handle.new_cache()
        hook = module.register_forward_pre_hook(
            lambda _, inputs: outs.append(inputs[0].unflatten(-1, (4, -1)))
        )
        fed(model, tokens, (20, 11, 1), cache)
    hook.remove()
    return torch.cat(outs, dim=1), cache


@pytest.mark.parametrize("sizes", [(600,), (200,), (590, 1)], ids=str)
@every_policy
def test_policy_memory_equals_retained_tokens(case, sizes, build, keeping, ids):
    model = case.build(build)
    # Keys and values of 64 fp32 numbers in 2 KV heads.
    token = 2 * 2 * 64 * 4
    with keeping(model, case.record).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, ids(600), sizes, cache)
    for layer, report in zip(cache.layers, memory_report(cache).layers, strict=True):
        (policy,) = layer.policies
        (retained,) = policy.cached
        headroom = policy.size(retained) - retained
        assert headroom <= max(256, retained // 8)
        # Scores and positions, and sinks as they came, are a few bytes more.
        assert report.device <= 1.02 * token * (retained + headroom) + 4 * token
        assert report.cached == retained and report.seen == 600
        if case in DROPPING:
            assert retained < 250


def policy_of(case: Case, build: Callable[..., Any]) -> Any:
    """A policy's state for one layer."""
    model = case.build(build)
    module = model.model.layers[0].self_attn
    return POLICIES[case.rule.kind].maker(case.rule, model, module)()


def attend(policy: Any, n: int) -> None:
    """Give a policy n random tokens of 4 query heads and 2 KV heads."""
    q = torch.randn(1, 4, n, 64)
    k = torch.randn(1, 2, n, 64)
    v = torch.randn(1, 2, n, 64)
    call = Step(q=q, k=k, v=v, logits=Logits(scale=0.1), backend="auto")
    for step in policy.steps(call):
        view = policy.view(step)
        policy.update(step, view.attend(step)[1])


@every_policy
def test_policy_steps_leak_no_memory(case, build):
    policy = policy_of(case, build)
    attend(policy, 100)
    moved = 0
    place = None
    traced = []
    # The collector then looks at new objects only.
    gc.freeze()
    tracemalloc.start()
    for step in range(401):
        if step % 100 == 0:
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])
        attend(policy, 1)
        moved += policy.keys.data_ptr() != place
        place = policy.keys.data_ptr()
    tracemalloc.stop()
    gc.unfreeze()
    # Python's smallest object has 16 bytes. A leak grows in every quarter; Python's lists of freed
    # objects and other threads of the process allocate in some.
    assert min(later - sooner for sooner, later in pairwise(traced)) < 16 * 100
    assert policy.seen == (501,)
    # New memory is rare: its headroom is proportional to the retained tokens.
    assert moved <= 40


@every_policy
def test_policy_step_writes_only_its_rows(case, build):
    """No step copies all tokens: only its row, the sinks and the dropped row may change."""
    policy = policy_of(case, build)
    attend(policy, 300)
    for _ in range(20):
        attend(policy, 1)
        before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
        places = {name: tensor.data_ptr() for name, tensor in policy.tensors().items()}
        (kept,) = policy.cached
        attend(policy, 1)
        for name in ("keys", "values"):
            tensor = policy.tensors()[name]
            if tensor.data_ptr() != places[name]:
                continue
            sinks = getattr(policy, "sinks", 0) if name == "keys" else 0
            changed = tensor[:, :, sinks:kept] != before[name][:, :, sinks:kept]
            assert (changed.any(-1).sum(-1) <= 1).all()


@every_policy
def test_policy_backends_and_dtypes_agree(case, build, keeping, ids):
    model = case.build(build)
    tokens = ids(60)
    results = []
    for backend in ("reference", "auto"):
        with keeping(model, case.record).apply(model, backend=backend) as handle:
            results.append(fed(model, tokens, (40, 1), handle.new_cache()))
    torch.testing.assert_close(*results, **CLOSE)
    narrow = model.to(torch.bfloat16)
    with keeping(narrow, case.record).apply(narrow) as handle:
        cache = handle.new_cache()
        logits = fed(narrow, tokens[:, :16], (10, 1), cache).float()
    for name, tensor in cache.layers[0].policies[0].tensors().items():
        small = torch.float32 if name == "scores" else torch.bfloat16
        assert tensor.dtype == (torch.int32 if name == "positions" else small)
    # Nothing is dropped of 16 tokens but by fractions.
    expected = results[0][:, :16]
    assert isinstance(case.record, H2O) or (logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    "record",
    [
        Full(),
        Streaming(sinks=2, window=200),
        H2O(heavy=100, recent=100),
        SnapKV(budget=200, window=8),
    ],
    ids=lambda record: record.kind,
)
def test_policy_softcap_applies_to_output_and_scores(record, build, keeping, ids):
    model = build("Gemma2", layer_types=["full_attention"] * 2)
    tokens = ids(60)
    with keeping(model, record).apply(model) as handle:
        logits = fed(model, tokens, (30, 20, 1), handle.new_cache())
    torch.testing.assert_close(logits, model(tokens, use_cache=False).logits, **CLOSE)
    small = {"heavy": 9, "recent": 5, "budget": 14}
    fewer = record.model_copy(update={k: v for k, v in small.items() if hasattr(record, k)})
    both = []
    for backend in ("reference", "auto"):
        with keeping(model, fewer).apply(model, backend=backend) as handle:
            both.append(fed(model, tokens, (40, 1), handle.new_cache()))
    torch.testing.assert_close(*both, **CLOSE)
