"""Carries fields of a GGUF file into a model's configuration that transformers leaves out.

transformers reads the fields in its own table and drops all others: the scaling of a rotation, a
sliding window, a soft cap. Each field of the architecture must agree with the configuration, be
added to it, or be without effect; a file with any other field is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.models.gguf_header import Header, read_floats

# Without effect on a causal model's logits.
_UNUSED = frozenset({"tensor_data_layout", "pooling_type", "rope.scaling.finetuned"})
# The shapes and the number of the weights show them; transformers compares those.
_SHAPES = frozenset(
    {
        "vocab_size", "block_count", "feed_forward_length", "attention.value_length",
        "expert_shared_count", "nextn_predict_layers", "full_attention_interval",
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
        "ssm.inner_size", "shortconv.l_cache",
    }
)  # fmt: skip
# Fields by their names in configurations, of which the first that a family has counts.
_NORMS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
_FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": _NORMS,
    "attention.layer_norm_epsilon": _NORMS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
}
# Values by which a field is switched off.
_OFF: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_weights_scale": 1.0,
    "logit_scale": 1.0,
    "leading_dense_block_count": 0,
}
_GATING = {1: "softmax", 2: "sigmoid"}
# Layers of the models whose scores are scaled by their width and not by that of a head: Gemma 2
# 27B and Gemma 3 27B. llama.cpp recognizes them by this number, no field says it.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_THETA = 10_000.0
# Llama 3.1's: the fields are not in the file, only the factors that follow from them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def completed(config: Any, path: Path, header: Header) -> Any:
    """Return the configuration with what transformers leaves out of a GGUF file.

    Args:
        config: of transformers, from the file.
        path: the file, whole.
        header: its header.

    Raises:
        HeadwiseError: a field of the file has no counterpart in the configuration.
    """
    architecture = str(header.fields["general.architecture"])
    prefix = f"{architecture}."
    fields = {
        key.removeprefix(prefix): value
        for key, value in header.fields.items()
        if key.startswith(prefix)
    }
    changes: dict[str, Any] = {}
    for key, value in fields.items():
        if not key.startswith("rope."):
            changes |= _change(config, key, value, architecture)
    layers = _SCALED_BY_WIDTH.get(architecture)
    if config.num_hidden_layers == layers and "attention.scale" not in fields:
        changes["query_pre_attn_scalar"] = config.hidden_size // config.num_attention_heads
    config = _rebuilt(config, changes)
    rope = {
        key.removeprefix("rope."): value for key, value in fields.items() if key.startswith("rope.")
    }
    factors = {name: read_floats(path, header, name) for name in FACTORS}
    return _rebuilt(config, _rotation(config, rope, factors))


def _rebuilt(config: Any, changes: dict[str, Any]) -> Any:
    """Return the configuration with the changes, and check that it has accepted them."""
    if not changes:
        return config
    changed = type(config).from_dict(config.to_dict() | changes)
    for name, value in changes.items():
        if name != "rope_parameters" and not _equal(getattr(changed, name, None), value):
            raise HeadwiseError(
                f"its {name} is {shorten(value)}, and {config.model_type} of transformers has "
                f"{shorten(getattr(changed, name, None))}"
            )
    return changed


def _change(config: Any, key: str, value: Any, architecture: str) -> dict[str, Any]:
    """Return the fields of the configuration to change for one field of the file.

    Raises:
        HeadwiseError: the configuration has no field for it.
    """
    if key in _UNUSED or key in _SHAPES or (key in _OFF and _equal(value, _OFF[key])):
        return {}
    special = _SPECIAL.get(key)
    if special is not None:
        return special(config, value, architecture)
    names = [name for name in _FIELDS.get(key, ()) if hasattr(config, name)][:1]
    if isinstance(value, list):
        # One for each layer, 0 for a layer without attention.
        numbers = {each for each in value if each}
        if len(numbers) != 1:
            raise _refusal(f"{architecture}.{key}", value, config)
        (value,) = numbers
    if key == "attention.sliding_window" and not names and value >= _positions(config):
        return {}
    if key == "context_length" and not names:
        # No positions that end.
        return {}
    # A family without the field has heads of the width by their number.
    if key == "attention.key_length" and not names:
        if value == config.hidden_size // config.num_attention_heads:
            return {}
        names = ["head_dim"]
    if not names:
        raise _refusal(f"{architecture}.{key}", value, config)
    (name,) = names
    if _equal(getattr(config, name, None), value):
        return {}
    return {name: value}


def _scale(config: Any, value: Any, architecture: str) -> dict[str, Any]:
    if hasattr(config, "query_pre_attn_scalar"):
        return {"query_pre_attn_scalar": round(value**-2)}
    if _equal(value, _head_dim(config) ** -0.5):
        return {}
    raise _refusal(f"{architecture}.attention.scale", value, config)


def _window_pattern(config: Any, value: Any, architecture: str) -> dict[str, Any]:
    """`value` is the period of layers without a window, or has True for each with one."""
    layers = range(config.num_hidden_layers)
    if isinstance(value, list):
        sliding = [bool(value[at % len(value)]) for at in layers]
    else:
        sliding = [bool(value) and (at + 1) % value > 0 for at in layers]
    types = ["sliding_attention" if each else "full_attention" for each in sliding]
    if getattr(config, "layer_types", None) is None:
        raise _refusal(f"{architecture}.attention.sliding_window_pattern", value, config)
    return {"layer_types": types}


def _gating(config: Any, value: Any, architecture: str) -> dict[str, Any]:
    if getattr(config, "scoring_func", "softmax") != _GATING.get(value):
        raise _refusal(f"{architecture}.expert_gating_func", value, config)
    return {}


_SPECIAL: dict[str, Callable[[Any, Any, str], dict[str, Any]]] = {
    "attention.scale": _scale,
    "attention.sliding_window_pattern": _window_pattern,
    "expert_gating_func": _gating,
}


def _rotation(
    config: Any, rope: dict[str, Any], factors: dict[str, list[float] | None]
) -> dict[str, Any]:
    """Return the changes of the configuration by which it rotates as llama.cpp does.

    Args:
        config: has all other fields of the file.
        rope: fields of the file after `rope.`.
        factors: tensors of FACTORS.

    Raises:
        HeadwiseError: the rotation has no form in transformers.
    """
    present = [name for name, each in factors.items() if each is not None]
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        if rope or present:
            raise HeadwiseError(
                f"its rotation ({', '.join([*rope, *present])}) has no place in "
                f"{config.model_type} of transformers"
            )
        return {}
    rope = dict(rope)
    nested = any(isinstance(each, dict) for each in parameters.values())
    full = dict(parameters["full_attention"] if nested else parameters)
    theta_of_windows = rope.pop("freq_base_swa", None)
    full["rope_theta"] = float(rope.pop("freq_base", full["rope_theta"] if nested else _THETA))
    _set_dimensions(config, rope, full)
    full = _scaled(config, rope, full, factors)
    if rope:
        key, value = next(iter(rope.items()))
        raise _refusal(f"rope.{key}", value, config)
    changes: dict[str, Any] = {}
    # Phi-3 has it outside of the rotation, where it takes precedence.
    original = full.get("original_max_position_embeddings")
    if original and hasattr(config, "original_max_position_embeddings"):
        changes["original_max_position_embeddings"] = original
    if nested:
        windows = dict(parameters["sliding_attention"])
        if theta_of_windows is not None:
            windows["rope_theta"] = float(theta_of_windows)
        full = {"full_attention": full, "sliding_attention": windows}
    elif theta_of_windows is not None and not _equal(theta_of_windows, full["rope_theta"]):
        raise _refusal("rope.freq_base_swa", theta_of_windows, config)
    if full == parameters:
        return changes
    return changes | {"rope_parameters": full}


def _set_dimensions(config: Any, rope: dict[str, Any], full: dict[str, Any]) -> None:
    """Take the fields of the rotated dimensions out of `rope`, and set their fraction."""
    head_dim = _head_dim(config)
    dimensions = rope.pop("dimension_count", head_dim)
    if hasattr(config, "rotary_dim"):
        if config.rotary_dim != dimensions:
            raise _refusal("rope.dimension_count", dimensions, config)
    elif dimensions != int(head_dim * full.get("partial_rotary_factor", 1.0)):
        if "partial_rotary_factor" in full:
            full["partial_rotary_factor"] = dimensions / head_dim
        else:
            raise HeadwiseError(
                f"it rotates {dimensions} of {head_dim} dimensions, and {config.model_type} of "
                "transformers rotates all"
            )
    sections = rope.pop("dimension_sections", None)
    if sections is not None:
        sections = [each for each in sections if each]
        if full.get("mrope_section") != sections:
            raise _refusal("rope.dimension_sections", sections, config)


def _scaled(
    config: Any,
    rope: dict[str, Any],
    full: dict[str, Any],
    factors: dict[str, list[float] | None],
) -> dict[str, Any]:
    """Take the fields of a scaling out of `rope`, and return the rotation with it.

    Defaults are llama.cpp's: linear scaling by 1.
    """
    kind = rope.pop("scaling.type", "linear")
    old = rope.pop("scale_linear", 1.0)
    factor = float(rope.pop("scaling.factor", old) or 1.0)
    attention = float(rope.pop("scaling.attn_factor", 1.0) or 1.0)
    original = rope.pop("scaling.original_context_length", None)
    frequencies = factors["rope_freqs.weight"]
    if frequencies is not None and all(_equal(each, 1.0) for each in frequencies):
        frequencies = None
    long = factors["rope_factors_long.weight"]
    short = factors["rope_factors_short.weight"]
    pairs = int(_head_dim(config) * full.get("partial_rotary_factor", 1.0)) // 2
    for name, each in factors.items():
        if each is not None and len(each) != pairs:
            raise HeadwiseError(f"its {name} has {len(each)} factors for {pairs} frequencies")
    if kind == "none":
        factor = 1.0
    if long or short or kind == "longrope":
        if not (long and short and original) or frequencies or kind == "yarn":
            raise HeadwiseError(
                "its longrope needs rope_factors_long, rope_factors_short and "
                "rope.scaling.original_context_length, and no other scaling"
            )
        own: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        own["original_max_position_embeddings"] = original
        own["factor"] = max(_positions(config) / original, 1.0)
        if attention != 1.0:
            own["attention_factor"] = attention
        return _base(full) | own
    if kind == "yarn":
        if frequencies:
            raise HeadwiseError("its rotation has both YaRN and rope_freqs")
        return _base(full) | _yarn(config, rope, factor, attention, original)
    if kind not in ("none", "linear"):
        raise _refusal("rope.scaling.type", kind, config)
    if attention != 1.0:
        raise _refusal("rope.scaling.attn_factor", attention, config)
    if frequencies:
        if factor != 1.0:
            raise HeadwiseError("its rotation has both linear scaling and rope_freqs")
        return _base(full) | _llama3(frequencies, full["rope_theta"], original)
    if factor != 1.0:
        return _base(full) | {"rope_type": "linear", "factor": factor}
    return _base(full) | {"rope_type": "default"}


def _base(full: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a rotation that are not its scaling."""
    names = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
    return {name: full[name] for name in names if name in full}


def _yarn(
    config: Any, rope: dict[str, Any], factor: float, attention: float, original: int | None
) -> dict[str, Any]:
    """YaRN: llama.cpp multiplies its own attention factor by the file's."""
    attention *= float(rope.pop("scaling.yarn_attn_factor", 1.0))
    if (mixed := rope.pop("scaling.yarn_ext_factor", 1.0)) not in (1.0, -1.0):
        raise _refusal("rope.scaling.yarn_ext_factor", mixed, config)
    if multiplier := rope.pop("scaling.yarn_log_multiplier", 0.0):
        raise _refusal("rope.scaling.yarn_log_multiplier", multiplier, config)
    own: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    own["original_max_position_embeddings"] = original or _positions(config)
    for name in ("beta_fast", "beta_slow"):
        if (value := rope.pop(f"scaling.yarn_{name}", None)) is not None:
            own[name] = float(value)
    if attention != 1.0:
        own["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return own


def _llama3(frequencies: list[float], theta: float, original: int | None) -> dict[str, Any]:
    """Find the scaling of Llama 3.1 whose factors are these.

    Raises:
        HeadwiseError: they are the factors of another scaling.
    """
    if min(frequencies) < 1.0 - 1e-6:
        raise HeadwiseError(f"its rope_freqs must be at least 1, the least is {min(frequencies):g}")
    own: dict[str, Any] = {"rope_type": "llama3", "factor": max(frequencies)} | _LLAMA3
    if original:
        own["original_max_position_embeddings"] = original
    count = len(frequencies)
    for at, frequency in enumerate(frequencies):
        wavelength = 2 * math.pi * theta ** (at / count)
        turns = float(own["original_max_position_embeddings"]) / wavelength
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1.0 / ((1.0 - smooth) / max(frequencies) + smooth)
        if not math.isclose(frequency, expected, rel_tol=1e-3):
            raise HeadwiseError(
                f"its rope_freqs are not Llama 3.1's for a rotation of base {theta:g}: factor "
                f"{at} is {frequency:.4g}, not {expected:.4g}"
            )
    return own


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _positions(config: Any) -> float:
    return float(getattr(config, "max_position_embeddings", None) or math.inf)


def _equal(a: Any, b: Any) -> bool:
    """Compare two values; those of a file are fp32."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)
    return bool(a == b)


def _refusal(key: str, value: Any, config: Any) -> HeadwiseError:
    return HeadwiseError(
        f"its field {key} = {shorten(value)} has no counterpart in {config.model_type} of "
        "transformers"
    )
