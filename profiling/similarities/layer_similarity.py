"""Measures the similarity of layers on prompts of several tasks: OmniKV, section 3.1 and Figures
1c, 6 and 8.

Shapes: L layers of the model, N of them measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import at_least, check_ranges, option, shared
from profiling.environment import environment
from profiling.inside.decode_capture import StepInputs, capture_decode
from profiling.inside.residual import ResidualStream
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.prompts.prompt import TASKS, Find, Prompt, Task, digest, make_prompts, parse_task
from profiling.prompts.tokens import Encoder
from profiling.similarities.mass import ability, agreement
from profiling.similarities.similarity_meter import FROZEN, TAIL, Meter, worst_of
from profiling.similarities.similarity_profile import FORMAT, Profile, file_name
from runtime.fingerprint import fingerprint

DEFAULT_TASKS = ("multi_hop", "two_stage_retrieval", "kv_retrieval")
DEFAULT_LENGTH = 4096
# OmniKV's own budget, and in a short prompt the share that it is of a usual one.
DEFAULT_TOP_K = 2048
_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class SimilarityConfig:
    """What to measure; None takes the default that depends on the model or the length."""

    model: str = shared(arguments.add_model)
    tasks: tuple[str, ...] = shared(
        arguments.add_task,
        f"prompts to decode (default {' '.join(DEFAULT_TASKS)})",
        default=DEFAULT_TASKS,
    )
    length: int | None = shared(
        arguments.add_length,
        f"tokens of a prompt (default {DEFAULT_LENGTH})",
        default=None,
        within=at_least(4 * TAIL),
    )
    samples: int = option("prompts of each task", default=2, within=at_least(1))
    steps: int = option("decode steps of each prompt", default=32, within=at_least(1))
    top_k: int | None = option(
        f"tokens that a layer chooses (default {DEFAULT_TOP_K}, at most an eighth of the prompt)",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    seed: int = shared(arguments.add_seed, default=0)
    greedy: bool = option(
        "follow the model's own tokens from the first, not the expected answer or the text as far "
        "as known",
        default=False,
        action="store_true",
        advanced=True,
    )
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")
    revision: str | None = shared(arguments.add_revision, default=None)
    beyond_positions: bool = option(
        "allow a --length over the model's positions",
        default=False,
        action="store_true",
        advanced=True,
    )
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.tasks:
            raise HeadwiseError(f"no task given; known: {TASKS}")
        names = [file_name(parse_task(task).name) for task in self.tasks]
        for name in names:
            if names.count(name) > 1:
                raise HeadwiseError(f"two tasks are called {name!r}: give each a name of its own")


def measure(
    config: SimilarityConfig,
    loaded: LoadedModel,
    ledger: Ledger | None = None,
    *,
    prompts: Mapping[str, Sequence[Prompt]] | None = None,
) -> Profile:
    """Measure on a model that is loaded; the model is left as it was.

    ledger: keeps what each prompt gave; its settings say which model that is of. prompts: by the
    names of all tasks, each of `prompt_length` tokens; those of the configuration's seed if None.
    """
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    config = resolve(config, loaded.name, model.max_positions)
    tasks = [parse_task(task) for task in config.tasks]
    prompts = prompts_of(config, loaded.tokenizer) if prompts is None else prompts
    arrays: dict[str, np.ndarray] = {}
    total = sum(map(len, prompts.values())) * config.steps
    with phase("decoding", total, "steps") as shown:
        for task in tasks:
            meters = [_kept(config, loaded, prompt, ledger, shown) for prompt in prompts[task.name]]
            arrays |= _arrays(task.name, meters, model.num_layers, config.steps)
    first = meters[0]
    arrays["agreement"] = agreement([arrays[f"mass.{task.name}.max"] for task in tasks])
    about = {
        "format": FORMAT,
        "model": model.name,
        **model.model_dump(
            include={"revision", "architecture", "config_sha256", "weights_sha256", "num_layers"}
        ),
        "layers": first["layers"],
        "sliding_layers": first["sliding"],
        "tasks": [{"name": name, "sha256": digest(made)} for name, made in prompts.items()],
        **{
            name: getattr(config, name)
            for name in ("length", "samples", "steps", "top_k", "seed", "greedy")
        },
        "kv_heads": first["error"].shape[-1],
        **{
            "tail": TAIL,
            "frozen": FROZEN,
            "dtype": config.dtype,
            "device": config.device,
            "command": config.command,
        },
        "versions": environment(config.device),
    }
    return Profile(arrays=arrays, about=about)


def resolve(config: SimilarityConfig, name: str, max_positions: int) -> SimilarityConfig:
    """Fill in the defaults; refuse a length past the model's positions and a top-k that is no
    choice."""
    room = max_positions - config.steps
    length = config.length or min(DEFAULT_LENGTH, room)
    if length > room and not config.beyond_positions:
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
    return replace(config, length=length, top_k=top_k)


def prompt_length(config: SimilarityConfig, task: Task) -> int:
    """Tokens of a prompt, once `resolve` has settled them; those of a text are followed by what
    stands there."""
    assert config.length is not None
    return config.length + (config.steps if task.kind == "text" else 0)


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
        for task in map(parse_task, config.tasks)
    }


def depends_on(config: SimilarityConfig, prompt: Prompt) -> dict[str, Any]:
    """What decoding a prompt gives depends on besides the model: of a unit of a ledger."""
    names = ("length", "steps", "top_k", "greedy", "dtype", "device")
    own = {"prompt": digest([prompt]), "finds": [asdict(find) for find in prompt.finds]}
    return {**{name: getattr(config, name) for name in names}, **own}


def _kept(
    config: SimilarityConfig,
    loaded: LoadedModel,
    prompt: Prompt,
    ledger: Ledger | None,
    shown: Phase,
) -> dict[str, Any]:
    """What a prompt gave: out of the ledger, or measured and put there."""
    if ledger is None:
        return _figures(_decode(config, loaded, prompt, shown))
    unit = ledger.unit("similarity", depends_on(config, prompt))
    found: dict[str, Any] | None = ledger.get(unit)
    if found is not None:
        shown.skip(config.steps)
        return found
    return ledger.put(unit, _figures(_decode(config, loaded, prompt, shown)))


def _figures(meter: Meter) -> dict[str, Any]:
    """What a meter has added up, as plain data."""
    return {
        "layers": meter.layers,
        "sliding": meter.sliding,
        "mass": {by: mass.cpu().numpy() for by, mass in meter.mass.items()},
        "error": meter.error.cpu().numpy(),
        "worst": meter.worst.cpu().numpy(),
        "missed": torch.stack(meter.missed, dim=1).cpu().numpy(),
        "hit": None if meter.hit is None else meter.hit.cpu().numpy(),
    }


class Watcher(Protocol):
    """What looks on while a prompt is decoded: see capture_decode."""

    def visit(self, step: int, inputs: StepInputs) -> None: ...

    def done(self, step: int) -> None: ...


W = TypeVar("W", bound=Watcher)


def _decode(config: SimilarityConfig, loaded: LoadedModel, prompt: Prompt, shown: Phase) -> Meter:
    assert config.length is not None and config.top_k is not None
    length = config.length
    top_k = config.top_k

    def made(stream: ResidualStream, finds: list[Find | None]) -> Meter:
        return Meter(length=length, top_k=top_k, finds=finds, stream=stream)

    meter = watched(config, loaded, prompt, shown, made)
    if not meter.layers:
        raise HeadwiseError(
            f"every layer of {loaded.name} slides over a window: none sees the whole prompt"
        )
    return meter


def watched(
    config: SimilarityConfig,
    loaded: LoadedModel,
    prompt: Prompt,
    shown: Phase,
    make: Callable[[ResidualStream, list[Find | None]], W],
) -> W:
    """Decode a prompt as the configuration says, watched by what `make` makes of the stream and
    each step's find."""
    assert config.length is not None
    expected = list(_expected(Encoder(loaded.tokenizer), prompt))
    finds = [find for _, find in expected[: config.steps]]
    finds += [None] * (config.steps - len(finds))
    stream = ResidualStream(loaded.model)
    meter = make(stream, finds)

    def done(step: int) -> None:
        meter.done(step)
        shown.update(step >= 0)

    ids = torch.tensor([prompt.input_ids[: config.length]], device=loaded.model.device)
    ends = loaded.model.generation_config.eos_token_id if loaded.model.generation_config else None
    with stream:
        capture_decode(
            loaded.model,
            ids,
            meter.visit,
            done,
            steps=config.steps,
            tail=TAIL,
            continuation=() if config.greedy else continuation(config, loaded.tokenizer, prompt),
            avoid=ends if isinstance(ends, list) else [] if ends is None else [ends],
        )
    return meter


def continuation(config: SimilarityConfig, tokenizer: Any, prompt: Prompt) -> list[int]:
    """The tokens that are known to follow a prompt: the expected answer, or what stands there in a
    text."""
    assert config.length is not None
    expected = [token for token, _ in _expected(Encoder(tokenizer), prompt)]
    return expected + list(prompt.input_ids[config.length :])


def _expected(encode: Encoder, prompt: Prompt) -> Iterator[tuple[int, Find | None]]:
    """The tokens of the expected answer, each with what it takes from the prompt."""
    if not prompt.finds:
        yield from ((token, None) for token in encode(prompt.answer or ""))
    for find in prompt.finds:
        yield from ((token, None) for token in encode(find.lead))
        yield from ((token, find) for token in encode(find.expected))


def _arrays(
    task: str, meters: Sequence[Mapping[str, Any]], num_layers: int, steps: int
) -> dict[str, np.ndarray]:
    """One task's arrays over all layers, averaged over its prompts."""
    layers = meters[0]["layers"]

    def spread(values: np.ndarray, *shape: int) -> np.ndarray:
        whole = np.full(shape, np.nan, dtype=np.float32)
        whole[np.ix_(layers, layers) if shape == (num_layers, num_layers) else layers] = values
        return whole

    def mean(values: Sequence[np.ndarray]) -> np.ndarray:
        return torch.stack([torch.from_numpy(value) for value in values]).mean(0).numpy()

    made = {}
    for by in ("max", "mean"):
        mass = mean([meter["mass"][by] / steps for meter in meters])
        made[f"mass.{task}.{by}"] = spread(mass, num_layers, num_layers)
    error = mean([meter["error"] / steps for meter in meters])
    worst = np.max([meter["worst"] / worst_of(steps) for meter in meters], axis=0)
    for name, by_head in (("error", error), ("worst", worst)):
        made[f"{name}.{task}"] = np.full(
            (num_layers, num_layers, by_head.shape[-1]), np.nan, dtype=np.float32
        )
        made[f"{name}.{task}"][np.ix_(layers, layers)] = by_head
    for reach in (8, 16):
        made[f"ability.{task}.next{reach}"] = ability(made[f"mass.{task}.max"], reach).astype(
            np.float32
        )
    missed = mean([meter["missed"] for meter in meters])
    made[f"variability.{task}"] = spread(missed, num_layers, steps)
    hits = [meter["hit"] for meter in meters if meter["hit"] is not None]
    if hits:
        made[f"hit.{task}"] = spread(mean(hits), num_layers)
    return made
