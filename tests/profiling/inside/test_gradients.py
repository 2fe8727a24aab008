"""One pass forward and back, against autograd of a plain model and differences of the loss."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from profiling.inside.capture import Run, attend_densely, attending_with, layer_mask, masks_of
from profiling.inside.gradients import gradient_pass
from runtime.layers import attention_layers, full_layers
from tests.runtime.tiny import FAMILIES, tiny_model
from tests.sampling import sampled

LENGTH = 130


def prompt(vocabulary: int = 97) -> Tensor:
    return torch.randint(3, vocabulary, (1, LENGTH), generator=torch.Generator().manual_seed(5))


def answer_mask(*at: int) -> Tensor:
    result = torch.zeros(LENGTH, dtype=torch.bool)
    result[list(at)] = True
    return result


TEXT, ANSWER = answer_mask(), answer_mask(60, 61, 129)


def gradients(model, ids, answers=TEXT, **options):
    """The pass, and gradients of its layers."""
    result = {}

    def visit(layer):
        result[layer.inputs.layer] = layer.by_out.clone()

    return gradient_pass(model, ids, answers, visit, **options), result


def searched(model: Any) -> set[int]:
    """Layers that see every token; those with a window are computed and not visited."""
    modules = attention_layers(model)
    return set(full_layers(modules))


def loss_of(logits: Tensor, ids: Tensor, answers: Tensor) -> Tensor:
    """Loss of logits (S, V): -log p of all tokens, or log-odds of the answers'."""
    log_p = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    if not bool(answers.any()):
        return -log_p.sum()
    answer_log_p = log_p[answers[1:]]
    return -(answer_log_p - torch.log1p(-answer_log_p.exp())).sum()


def by_autograd(model, ids, answers):
    """Dense outputs by layer (1, S, H, E), their gradients, and logits (S, V), by torch alone."""
    before = model.config._attn_implementation
    outs = {}

    def attention(module, q, k, v, mask, **kwargs):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        logits = q @ k.transpose(2, 3) * kwargs["scaling"]
        window = kwargs.get("sliding_window") or LENGTH
        far = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        logits = logits.masked_fill((far < 0) | (far >= window), float("-inf"))
        out = (logits.softmax(-1) @ v).transpose(1, 2).contiguous()
        out.retain_grad()
        outs[module.layer_idx] = out
        return out, None

    from transformers import AttentionInterface

    AttentionInterface.register("plain", attention)
    model.set_attn_implementation("plain")
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0]
        loss_of(logits.double(), ids, answers).backward()
    finally:
        model.set_attn_implementation(before)
        model.zero_grad()
    gradients = {layer: out.grad for layer, out in outs.items() if out.grad is not None}
    return outs, gradients, logits.detach()


@pytest.mark.parametrize(
    ("family", "answers"), [("Llama", TEXT), ("Llama", ANSWER), ("Gemma3", ANSWER)]
)
def test_gradient_pass_equals_autograd_in_a_plain_model(family, answers):
    model, ids, keep = tiny_model(family), prompt(), torch.tensor([0, 59, 128])
    outs, expected, logits = by_autograd(model, ids, answers)
    order = []

    def visit(layer):
        at = layer.inputs.layer
        order.append(at)
        torch.testing.assert_close(layer.out.transpose(1, 2), outs[at], atol=1e-4, rtol=1e-3)
        wanted = expected[at].transpose(1, 2)
        assert (layer.by_out - wanted).norm() <= 2e-3 * wanted.norm()

    result = gradient_pass(model, ids, answers, visit, keep=keep)
    assert result.gradients and result.fault is None
    assert set(expected) == set(attention_layers(model))
    assert order == sorted(searched(model), reverse=True)
    log_probs = logits.log_softmax(-1)
    torch.testing.assert_close(result.log_probs, log_probs[keep].half(), atol=1e-2, rtol=1e-3)
    answer_mask = ~result.nll.isnan()
    assert (
        answer_mask[answers[1:]].all()
        and answer_mask[keep].all()
        and (answer_mask.all() or answers.any())
    )
    assert torch.equal(result.likeliest[answer_mask], log_probs[:-1].argmax(-1)[answer_mask])
    nll = -log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(result.nll[answer_mask], nll[answer_mask], atol=1e-3, rtol=1e-3)


def loss_with(model, ids, layer, added) -> float:
    """The loss with (S, H, E) added to a layer's attention."""
    run = Run(lambda inputs: None)

    def attention(module, *args, **kwargs):
        out, weights = attend_densely(run, module, *args, **kwargs)
        return (out + added[None] if getattr(module, "layer_idx", None) == layer else out), weights

    with (
        torch.no_grad(),
        masks_of(run),
        attending_with(model, "differences", attention, layer_mask),
    ):
        return float(loss_of(model(input_ids=ids, use_cache=False).logits[0].double(), ids, TEXT))


# One of each way to attend, to route, and to make logits of states.
KEPT = ("Qwen2", "Gemma2", "Cohere2", "Granite", "GptOss", "Mixtral", "Qwen3Next", "DeepseekV3")


@pytest.mark.parametrize("family", sampled(FAMILIES, *KEPT))
@pytest.mark.filterwarnings("ignore")
def test_gradient_pass_of_every_architecture_equals_differences(family):
    model, ids = tiny_model(family, vocab_size=260), prompt(200)
    done, result = gradients(model, ids)
    assert done.gradients and set(result) == searched(model)
    torch.manual_seed(1)
    for layer, by_out in result.items():
        gradient = by_out[0].transpose(0, 1)
        added = torch.randn_like(gradient) * 1e-3
        up, down = (loss_with(model, ids, layer, by) for by in (added, -added))
        # A router that sends a token elsewhere is no slope.
        near = 0.2 if "Mixtral" in family or "Moe" in family else 0.02
        size = float(added.norm() * gradient.norm()) / gradient.numel() ** 0.5
        slope = float((gradient * added).sum())
        assert slope == pytest.approx((up - down) / 2, rel=near, abs=near * size)


@pytest.mark.parametrize("answers", [TEXT, ANSWER], ids=["text", "answers"])
def test_gradient_pass_with_chunked_logits_is_the_same(answers, monkeypatch):
    model, ids, keep = tiny_model("Llama"), prompt(), torch.tensor([3, 39, 40, 129])
    whole, by_layer = gradients(model, ids, answers, keep=keep)
    monkeypatch.setattr("profiling.inside.gradients._LOGITS", 97 * 40)
    pieces, again = gradients(model, ids, answers, keep=keep)
    torch.testing.assert_close(pieces.log_probs, whole.log_probs)
    for layer, gradient in by_layer.items():
        torch.testing.assert_close(again[layer], gradient)


@pytest.mark.parametrize("raising", [False, True])
def test_gradient_pass_restores_the_model(raising):
    model, ids = tiny_model("Gemma3"), prompt()
    with torch.no_grad():
        expected = model(ids).logits
    model.train()
    before = model.config._attn_implementation
    hooks = [len(module._forward_hooks) for module in model.modules()]
    own = [set(vars(module)) for module in model.modules()]
    model.get_output_embeddings().requires_grad_(False)
    asking = [weight.requires_grad for weight in model.parameters()]

    def visit(layer):
        if raising:
            raise RuntimeError("in a visit")

    with pytest.raises(RuntimeError, match="in a visit") if raising else nullcontext():
        gradient_pass(model, ids, TEXT, visit)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == before
    assert [set(vars(module)) for module in model.modules()] == own
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [weight.requires_grad for weight in model.parameters()] == asking
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, expected)


def test_gradient_pass_holds_one_layer_at_a_time():
    """Inputs and gradients of later layers are gone when a layer is visited."""
    model, ids = tiny_model("Llama"), prompt()
    held = []

    def visit(layer):
        assert all(ref.expired() for refs in held for ref in refs)
        inputs = layer.inputs
        tensors = (layer.by_out, layer.out, inputs.q, inputs.k, inputs.v)
        held.append([StorageWeakRef(tensor.untyped_storage()) for tensor in tensors])

    assert gradient_pass(model, ids, TEXT, visit).gradients
    assert len(held) == len(searched(model)) > 1


def test_gradient_pass_releases_offloaded_weights(tmp_path, monkeypatch):
    from accelerate import disk_offload

    model, ids = tiny_model("Llama"), prompt()
    a_layer = [each for each in model.model.layers[0].modules() if isinstance(each, nn.Linear)]
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    used = []
    linear = nn.functional.linear

    def recorded(value, weight, *rest):
        used.append(StorageWeakRef(weight.untyped_storage()))
        return linear(value, weight, *rest)

    def visit(layer):
        # Those that make q, k and v: the graph holds them for this layer's way back.
        assert sum(not ref.expired() for ref in used) <= 3

    monkeypatch.setattr(nn.functional, "linear", recorded)
    assert gradient_pass(model, ids, TEXT, visit).gradients
    assert len(used) > 2 * len(a_layer) * len(model.model.layers)


def test_gradient_pass_visits_wanted_layers_only():
    model, ids = tiny_model("Llama"), prompt()
    done, result = gradients(model, ids, wanted=lambda inputs: inputs.layer == 1)
    everything = gradients(model, ids)[1]
    assert done.gradients and 0 < len(result) < len(everything)
    assert all(torch.equal(everything[layer], gradient) for layer, gradient in result.items())


@pytest.mark.filterwarnings("ignore")
def test_gradient_pass_has_no_dropout():
    model, ids = tiny_model("OPT", word_embed_proj_dim=128, ffn_dim=96, dropout=0.5), prompt()
    first, second = (gradients(model, ids)[1] for _ in range(2))
    assert first and all(torch.equal(second[layer], gradient) for layer, gradient in first.items())


def test_gradient_pass_of_changed_logits_reports_a_fault():
    model, ids, keep = tiny_model("Llama"), prompt(), torch.tensor([7])
    handle = model.register_forward_hook(
        lambda module, args, output: type(output)(
            logits=output.logits.sin(), past_key_values=output.past_key_values
        )
    )
    done, result = gradients(model, ids, keep=keep)
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)
    handle.remove()
    assert not result and not done.gradients and "LlamaForCausalLM" in str(done.fault)
    torch.testing.assert_close(done.log_probs, expected[keep].half(), atol=1e-2, rtol=1e-3)
    assert gradients(model, ids)[0].gradients


@pytest.mark.parametrize("where", ["call", "model", "adapter"])
def test_gradient_pass_in_inference_mode_reports_a_fault(where):
    with torch.inference_mode(where == "model"):
        model = tiny_model("Llama")
    with torch.inference_mode(where == "adapter"):
        weight = nn.Parameter(torch.ones(model.model.norm.weight.shape), requires_grad=False)
    if where == "adapter":
        model.model.norm.weight = weight
    tokens = torch.randint(0, 97, (1, 40))
    with torch.inference_mode(where == "call"):
        found = gradient_pass(model, tokens, torch.zeros(40, dtype=torch.bool), pytest.fail)
    assert not found.gradients and "torch.inference_mode" in found.fault
    with torch.no_grad():
        expected = nn.functional.cross_entropy(
            model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none"
        )
    torch.testing.assert_close(found.nll.clone(), expected, atol=1e-4, rtol=1e-4)


def test_gradient_pass_of_an_infinite_loss_reports_a_fault():
    model, ids = tiny_model("Llama"), prompt()
    model.lm_head.weight.data[5] = float("inf")
    done, result = gradients(model, ids)
    assert not done.gradients and not result and done.fault is not None
