"""The pictures of headwise heatmaps by name: loads or measures what they need, once, and has them
drawn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from artifacts import Artifact, HeadwiseError, load_pair
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared
from artifacts.errors import shorten
from profiling.inside.capture import LayerInputs, capture
from profiling.models.loading import LoadedModel, load_model
from profiling.pictures.head_survey import Survey, check_heads, survey
from profiling.pictures.layer_pictures import draw_layers
from profiling.pictures.model_pictures import draw_grid, draw_maps, some_heads, typical_heads
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task
from profiling.similarities.layer_similarity import DEFAULT_LENGTH, SimilarityConfig, measure
from profiling.similarities.similarity_profile import load_profile, save_profile
from runtime.fingerprint import check
from runtime.layers import text_config

PICTURES = ("layers", "maps", "sparsity")
_SHORTEST = 16


def _heads(text: str) -> tuple[tuple[int, int], ...]:
    """Read `3.0,12.5`: layer and head of each."""
    parts = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*", part) for part in text.split(",")]
    if not all(parts):
        raise HeadwiseError(f"--heads must be layer.head, such as 3.0,12.5, got {shorten(text)}")
    return tuple((int(part[1]), int(part[2])) for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Heatmaps:
    """What to draw from what; None takes the default that depends on the rest. heads: (layer, head)
    of the maps."""

    config: Path | None = shared(
        arguments.add_artifact,
        "artifact: its patterns are drawn over the maps, its filter layers marked",
        nargs="?",
        default=None,
    )
    out: Path = shared(arguments.add_out, "folder for the pictures", metavar="FOLDER")
    profile: Path | None = option("folder that headwise similarity wrote", default=None)
    model: str | None = shared(arguments.add_model, required=False, default=None)
    pictures: tuple[str, ...] | None = arg(
        "--picture",
        default=None,
        action="append",
        help=f"one of {', '.join(PICTURES)}; repeatable (default: all that can be drawn)",
    )
    heads: tuple[tuple[int, int], ...] | None = option(
        "heads of the maps as layer.head, such as 3.0,12.5 (default: a few typical ones)",
        default=None,
        read=_heads,
    )
    task: str = shared(
        arguments.add_task,
        f"prompt (default passkey); {arguments.TASKS}",
        several=False,
        default="passkey",
    )
    length: int | None = shared(
        arguments.add_length,
        f"its length in tokens (default {DEFAULT_LENGTH})",
        default=None,
        within=at_least(_SHORTEST),
    )
    seed: int = shared(arguments.add_seed, default=0)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")
    revision: str | None = shared(arguments.add_revision, default=None)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        parse_task(self.task)
        if self.profile is None and self.model is None:
            raise HeadwiseError("nothing to draw from: give --profile DIR or --model M")
        for name in self.pictures or ():
            if name not in PICTURES:
                raise HeadwiseError(
                    f"unknown picture {shorten(name)}; known: {', '.join(PICTURES)}"
                )
            if self.model is None and name != "layers":
                raise HeadwiseError(
                    f"the picture {name!r} needs --model: a profile has no single heads"
                )


class PictureBook:
    """The pictures by name; what several of them need is loaded or measured once."""

    def __init__(self, config: Heatmaps) -> None:
        self._config = config
        self._profile = None if config.profile is None else load_profile(config.profile)
        self._artifact: Artifact | None = None
        self._arrays: dict[str, np.ndarray] = {}
        if config.config is not None:
            self._artifact, self._arrays = load_pair(config.config)
        if self._artifact is not None:
            if config.model is not None:
                check(self._artifact.model, self._loaded.model)
            if (
                self._profile
                and self._profile.about["weights_sha256"] != self._artifact.model.weights_sha256
            ):
                raise HeadwiseError(
                    f"the profile is of {self._profile.about['model']}, the artifact of "
                    f"{self._artifact.model.name}: "
                    "give those of one model"
                )
        if config.heads is not None and config.model is not None:
            check_heads(self._loaded, config.heads)

    def layers(self) -> list[Path]:
        config = self._config
        written = list[Path]()
        if self._profile is None:
            assert config.model is not None
            settings = {
                name: getattr(config, name)
                for name in ("length", "seed", "dtype", "device", "command")
            }
            self._profile = measure(
                SimilarityConfig(model=config.model, tasks=(config.task,), **settings), self._loaded
            )
            written = save_profile(self._profile, config.out)[:1]
        decode = self._artifact.decode if self._artifact is not None else None
        section = None if decode is None else decode.omnikv
        return written + draw_layers(self._profile, config.out, config.command, section)

    def maps(self) -> list[Path]:
        return draw_maps(
            self._config.out, self._survey.maps, self._caption(self._prompted, *self._served)
        )

    def sparsity(self) -> list[Path]:
        out = self._config.out
        label = "share of entries below\n1% of the row's largest"
        paths = draw_grid(
            out, "sparsity", self._survey.sparsity, label, self._caption(self._prompted)
        )
        if (
            self._artifact is not None
            and self._artifact.search is not None
            and "chosen.density" in self._arrays
        ):
            calibration = self._artifact.search.calibration
            tasks = ", ".join(calibration.tasks)
            lengths = ", ".join(map(str, calibration.lengths))
            prompts = f"as searched on {tasks}, {lengths} tokens"
            skipped = 1 - self._arrays["chosen.density"]
            label = "share of tiles\nnot computed"
            paths += draw_grid(
                out, "kernel_sparsity", skipped, label, self._caption(prompts, *self._served)
            )
        return paths

    @cached_property
    def _loaded(self) -> LoadedModel:
        config = self._config
        assert config.model is not None
        return load_model(
            config.model, dtype=config.dtype, device=config.device, revision=config.revision
        )

    @cached_property
    def _prompt(self) -> Prompt:
        config = self._config
        positions = (
            getattr(text_config(self._loaded.model), "max_position_embeddings", None)
            or DEFAULT_LENGTH
        )
        length = config.length or min(DEFAULT_LENGTH, positions)
        return make_prompts(
            config.task, self._loaded.tokenizer, length=length, samples=1, seed=config.seed
        )[0]

    @cached_property
    def _survey(self) -> Survey:
        heads = self._config.heads
        if heads is None and self._artifact is not None and "chosen.recall" in self._arrays:
            heads = tuple(typical_heads(self._artifact, self._arrays["chosen.recall"]))
        if heads is None:
            heads = tuple(
                some_heads(
                    _full_layers(self._loaded), text_config(self._loaded.model).num_attention_heads
                )
            )
        return survey(self._loaded, self._prompt, heads, self._artifact, self._arrays)

    @property
    def _prompted(self) -> str:
        config = self._config
        prompt = self._prompt
        name = parse_task(config.task).name
        length = len(prompt.input_ids)
        return f"prompt: {name}, {length} tokens, seed {config.seed} ({digest([prompt])[:8]})"

    @property
    def _served(self) -> list[str]:
        if self._artifact is None or self._config.config is None:
            return []
        return [f"artifact: {self._config.config.name} ({self._artifact.content_sha256[:8]})"]

    def _caption(self, prompts: str, *more: str) -> str:
        config = self._config
        first = f"{self._loaded.name}, {config.dtype} on {config.device}; {prompts}"
        return "\n".join([first, *more, f"drawn: {config.command}"])


def _full_layers(loaded: LoadedModel) -> list[int]:
    """The layers that see every key: two tokens show it."""
    found: list[int] = []

    def visit(inputs: LayerInputs) -> None:
        if inputs.sliding_window is None:
            found.append(inputs.layer)

    capture(loaded.model, torch.zeros(1, 2, dtype=torch.long, device=loaded.model.device), visit)
    if not found:
        raise HeadwiseError(
            f"every layer of {loaded.name} slides over a window: none sees the whole prompt"
        )
    return found
