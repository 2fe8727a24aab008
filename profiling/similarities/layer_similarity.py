"""Measures the similarity of layers: OmniKV, section 3.1 and Figures 1c, 6 and 8.

Shapes: L layers of the model, N of them measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from artifacts import HeadwiseError
from profiling.environment import environment
from profiling.finite import check_finite
from profiling.inside.decode_capture import capture_decode
from profiling.inside.residual import ResidualStream
from profiling.ledger import Ledger
from profiling.models.device import device_of, dtype_of
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, announce, phase
from profiling.prompts.prompt import (
    Evidence,
    Prompt,
    Task,
    digest,
    fewer_sentences,
    make_prompts,
)
from profiling.prompts.tokens import Encoder
from profiling.similarities.accumulator import FROZEN, Accumulator, worst_of
from profiling.similarities.config import DEFAULT_LENGTH, DEFAULT_TOP_K, TAIL, SimilarityConfig
from profiling.similarities.mass import ability, agreement
from profiling.similarities.similarity_profile import FORMAT, Profile
from runtime.devices import execution_device
from runtime.fingerprint import fingerprint

# The default top-k of a short prompt is its length divided by this.
_SHARE = 8


def measure(
    config: SimilarityConfig,
    loaded: LoadedModel,
    ledger: Ledger | None = None,
    *,
    prompts: Mapping[str, Sequence[Prompt]] | None = None,
) -> Profile:
    """Measure on a loaded model; the model is left unchanged.

    Args:
        config: tasks, lengths and steps.
        loaded: the model.
        ledger: stores the result of each prompt; its settings identify the model.
        prompts: by the names of all tasks, each of `prompt_length` tokens; those of the
            configuration's seed if None.
    """
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    identity = identity_of(loaded.model, loaded.name).key
    config = resolve(config, loaded.name, model.max_positions)
    if prompts is None:
        prompts = prompts_of(config, loaded.tokenizer)
        for task in config.tasks:
            own = prompts[task.name]
            length = prompt_length(config, task)
            for line in fewer_sentences([task], own, length=length, samples=config.samples):
                announce(line)
    arrays: dict[str, np.ndarray] = {}
    total = sum(map(len, prompts.values())) * config.steps
    with phase("decoding", total, "steps") as shown:
        for task in config.tasks:
            by_prompt = [
                _measure_prompt(config, loaded, prompt, ledger, shown)
                for prompt in prompts[task.name]
            ]
            arrays |= _arrays(task.name, by_prompt, model.num_layers, config.steps)
    first = by_prompt[0]
    arrays["agreement"] = agreement([arrays[f"mass.{task.name}"] for task in config.tasks])
    about = {
        "format": FORMAT,
        "model": model.name,
        **model.model_dump(
            include={"revision", "architecture", "config_sha256", "weights_sha256", "num_layers"}
        ),
        "identity": identity,
        "layers": first["layers"],
        "sliding_layers": first["sliding"],
        "tasks": [
            {"name": name, "sha256": digest(task_prompts)} for name, task_prompts in prompts.items()
        ],
        **{
            name: getattr(config, name)
            for name in ("length", "samples", "steps", "top_k", "seed", "greedy")
        },
        "kv_heads": first["error"].shape[-1],
        **{
            "tail": TAIL,
            "frozen": FROZEN,
            "dtype": dtype_of(loaded.model),
            "device": device_of(loaded.model),
            "command": config.command,
        },
        "versions": environment(execution_device(loaded.model)),
    }
    return Profile(arrays=arrays, about=about)


def resolve(config: SimilarityConfig, name: str, max_positions: int) -> SimilarityConfig:
    """Fill in the defaults; refuse lengths past the positions and a top-k of all tokens."""
    longest = max_positions - config.steps
    length = config.length or min(DEFAULT_LENGTH, longest)
    if length > longest and not config.beyond_positions:
        raise HeadwiseError(
            f"--length {length} and {config.steps} steps are more than the {max_positions} "
            f"positions of {name}; "
            "choose a shorter one, or pass --beyond-positions to go past what the model was "
            "trained on"
        )
    top_k = config.top_k or max(1, min(DEFAULT_TOP_K, length // _SHARE))
    if top_k >= length:
        raise HeadwiseError(
            f"--top-k {top_k} chooses every token of {length}: give fewer than --length"
        )
    return config.replace(length=length, top_k=top_k)


def prompt_length(config: SimilarityConfig, task: Task) -> int:
    """Tokens of a prompt after `resolve`; a text's are followed by its next tokens."""
    assert config.length is not None
    if task.kind == "text":
        steps = config.steps
    else:
        steps = 0
    return config.length + steps


def prompts_of(config: SimilarityConfig, tokenizer: Any) -> dict[str, list[Prompt]]:
    """The prompts of the configuration's seed by the names of the tasks."""
    return {
        task.name: make_prompts(
            task,
            tokenizer,
            length=prompt_length(config, task),
            samples=config.samples,
            seed=config.seed,
        )
        for task in config.tasks
    }


def depends_on(config: SimilarityConfig, prompt: Prompt) -> dict[str, Any]:
    """Collect all that a prompt's figures depend on besides the model."""
    names = ("length", "steps", "top_k", "greedy", "dtype", "device")
    own = {"prompt": digest([prompt]), "evidence": [asdict(part) for part in prompt.evidence]}
    return {"format": FORMAT, **{name: getattr(config, name) for name in names}, **own}


def _measure_prompt(
    config: SimilarityConfig,
    loaded: LoadedModel,
    prompt: Prompt,
    ledger: Ledger | None,
    shown: Phase,
) -> dict[str, Any]:
    """Read a prompt's figures from the resume file, or measure and keep them."""
    if ledger is None:
        return _figures(_decode(config, loaded, prompt, shown))
    unit = ledger.unit("similarity", depends_on(config, prompt))
    figures: dict[str, Any] | None = ledger.get(unit)
    if figures is not None:
        shown.skip(config.steps)
        return figures
    return ledger.put(unit, _figures(_decode(config, loaded, prompt, shown)))


def _figures(sums: Accumulator) -> dict[str, Any]:
    """Return the sums of an accumulator as plain data."""
    if sums.hit is None:
        hit = None
    else:
        hit = sums.hit.cpu().numpy()
    return {
        "layers": sums.layers,
        "sliding": sums.sliding,
        "mass": sums.mass.cpu().numpy(),
        "error": sums.error.cpu().numpy(),
        "worst": sums.worst.cpu().numpy(),
        "missed": torch.stack(sums.missed, dim=1).cpu().numpy(),
        "hit": hit,
    }


def _decode(
    config: SimilarityConfig, loaded: LoadedModel, prompt: Prompt, shown: Phase
) -> Accumulator:
    """Decode a prompt as the configuration says, and sum up its figures."""
    assert config.length is not None and config.top_k is not None
    expected = list(_expected(Encoder(loaded.tokenizer), prompt))
    evidence = [span for _, span in expected[: config.steps]]
    evidence += [None] * (config.steps - len(evidence))
    stream = ResidualStream(loaded.model)
    sums = Accumulator(length=config.length, top_k=config.top_k, evidence=evidence, stream=stream)

    def done(step: int) -> None:
        sums.done(step)
        shown.update(step >= 0)

    ids = torch.tensor(
        [prompt.input_ids[: config.length]], device=execution_device(loaded.model), dtype=torch.long
    )
    forced = () if config.greedy else continuation(config, loaded.tokenizer, prompt)
    with stream:
        capture_decode(
            loaded.model,
            ids,
            sums.visit,
            done,
            steps=config.steps,
            tail=TAIL,
            continuation=forced,
            avoid=_ends(loaded.model),
        )
    if not sums.layers:
        raise HeadwiseError(f"no layer of {loaded.name} sees every token of a prompt")
    for at, layer in enumerate(sums.layers):
        # Of this layer with the tokens of each one before it.
        error = sums.error[:at, at].cpu().numpy()
        check_finite(error, f"{prompt.task}: errors of layer {layer} are", loaded.model)
    return sums


def _ends(model: Any) -> list[int]:
    """Tokens that end a text, by the model's generation config."""
    if model.generation_config:
        ends = model.generation_config.eos_token_id
    else:
        ends = None
    if ends is None:
        return []
    if isinstance(ends, list):
        return ends
    return [ends]


def continuation(config: SimilarityConfig, tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokens known to follow a prompt: the expected answer, or a text's next ones."""
    assert config.length is not None
    expected = [token for token, _ in _expected(Encoder(tokenizer), prompt)]
    return expected + list(prompt.input_ids[config.length :])


def _expected(encode: Encoder, prompt: Prompt) -> Iterator[tuple[int, Evidence | None]]:
    """Yield the tokens of the expected answer, each with its evidence span in the prompt."""
    if not prompt.evidence:
        yield from ((token, None) for token in encode(prompt.answer or ""))
    for part in prompt.evidence:
        yield from ((token, None) for token in encode(part.lead))
        yield from ((token, part) for token in encode(part.expected))


def _arrays(
    task: str, by_prompt: Sequence[Mapping[str, Any]], num_layers: int, steps: int
) -> dict[str, np.ndarray]:
    """One task's arrays over all layers, averaged over its prompts."""
    layers = by_prompt[0]["layers"]

    def spread(values: np.ndarray, *shape: int) -> np.ndarray:
        whole = np.full(shape, np.nan, dtype=np.float32)
        if shape == (num_layers, num_layers):
            where = np.ix_(layers, layers)
        else:
            where = layers
        whole[where] = values
        return whole

    def mean(values: Sequence[np.ndarray]) -> np.ndarray:
        return torch.stack([torch.from_numpy(value) for value in values]).mean(0).numpy()

    arrays = {}
    mass = mean([figures["mass"] / steps for figures in by_prompt])
    arrays[f"mass.{task}"] = spread(mass, num_layers, num_layers)
    error = mean([figures["error"] / steps for figures in by_prompt])
    worst = np.max([figures["worst"] / worst_of(steps) for figures in by_prompt], axis=0)
    for name, by_head in (("error", error), ("worst", worst)):
        arrays[f"{name}.{task}"] = np.full(
            (num_layers, num_layers, by_head.shape[-1]), np.nan, dtype=np.float32
        )
        arrays[f"{name}.{task}"][np.ix_(layers, layers)] = by_head
    for reach in (8, 16):
        arrays[f"ability.{task}.next{reach}"] = ability(arrays[f"mass.{task}"], reach).astype(
            np.float32
        )
    missed = mean([figures["missed"] for figures in by_prompt])
    arrays[f"variability.{task}"] = spread(missed, num_layers, steps)
    hits = [figures["hit"] for figures in by_prompt if figures["hit"] is not None]
    if hits:
        arrays[f"hit.{task}"] = spread(mean(hits), num_layers)
    return arrays
