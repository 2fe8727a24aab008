"""headwise heatmaps: pictures of attention, layer by layer, and of one head.

similarity   layer x layer, of each task and on average (OmniKV, Figure 8)
ability      fraction of attention that a layer's tokens keep in the layers after it (Figure 6a)
hit          how often they hold the answer (Figure 6b)
variability  attention missed when the tokens of the prompt are frozen (Figure 1c)
attention    of --head, with an artifact's pattern drawn over it

All but attention are of a saved profile, or of one that is measured on the model. Each picture is
written as PNG and SVG, its numbers as CSV.

    headwise heatmaps --profile profile/ --out pictures/
    headwise heatmaps cfg.yaml --model smollm2 --picture attention --head 12.5 --out pictures/
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from artifacts import Artifact, HeadwiseError, load_pair
from artifacts.cli.arguments import (
    ArtifactFile,
    Device,
    Dtype,
    Length,
    ModelName,
    Out,
    Revision,
    Seed,
)
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import shorten
from artifacts.files import check_writable, out_folder
from profiling.pictures.registry import Head, Source, pictures
from profiling.prompts.options import LISTED, OneTask
from profiling.prompts.prompt import Task
from profiling.similarities.config import DEFAULT_LENGTH, SHORTEST, SimilarityConfig
from profiling.similarities.similarity_profile import Profile, load_profile, save_profile

if TYPE_CHECKING:
    from profiling.models.loading import LoadedModel
    from profiling.prompts.prompt import Prompt

_PICTURES = pictures("model", "profile")
_NAMES = ", ".join(_PICTURES)
# Tokens of the shortest prompt.
_SHORTEST = 16


class Config(CommandConfig):
    """Options of the pictures; None takes the default that depends on the rest.

    Attributes:
        head: (layer, query head).
    """

    artifact: Annotated[
        ArtifactFile | None,
        Arg("artifact: its pattern is drawn over a head's attention, its filter layers marked"),
    ] = None
    out: Annotated[Out, Arg("folder for the pictures", metavar="FOLDER")]
    profile: Annotated[Path | None, Arg("folder that headwise similarity wrote")] = None
    model: ModelName | None = None
    pictures: Annotated[
        tuple[str, ...] | None,
        Arg(
            f"one of {_NAMES}; repeatable (default: all that can be drawn)",
            repeat=True,
            flags=("--picture",),
        ),
    ] = None
    head: Annotated[Head, Arg("head whose attention is drawn, as layer.head, such as 12.5")] = None
    task: Annotated[OneTask, Arg(f"prompt (default passkey); {LISTED}")] = Task("passkey")
    length: Annotated[
        Length | None, Arg(f"its length in tokens (default {DEFAULT_LENGTH})"), Field(ge=_SHORTEST)
    ] = None
    seed: Seed = 0
    dtype: Dtype = "auto"
    device: Device = "auto"
    revision: Revision = None
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile is None and self.model is None:
            raise HeadwiseError("nothing to draw from: give --profile DIR or --model M")
        for name in self.pictures or ():
            if name not in _PICTURES:
                raise HeadwiseError(f"unknown picture {shorten(name)}; known: {_NAMES}")
            if _PICTURES[name].of == "model" and (self.model is None or self.head is None):
                raise HeadwiseError(f"the picture {name!r} needs --model and --head")
        measured = [name for name in self.names if _PICTURES[name].of == "profile"]
        if self.profile is None and measured and (self.length or SHORTEST) < SHORTEST:
            raise HeadwiseError(
                f"--length must be at least {SHORTEST} for the picture {measured[0]!r}, got "
                f"{self.length}"
            )
        return self

    @property
    def names(self) -> list[str]:
        """Names of the pictures that are drawn."""
        can_be = [
            name
            for name, each in _PICTURES.items()
            if each.of == "profile" or (self.model is not None and self.head is not None)
        ]
        return [name for name in can_be if self.pictures is None or name in self.pictures]


def run(config: Config) -> int:
    """Draw, and print the files."""
    for path in draw(config):
        print(path)
    return 0


def draw(config: Config) -> list[Path]:
    """Draw into the folder `config.out` and return the files.

    Raises:
        HeadwiseError: a mistake of the user.
    """
    origins = {_PICTURES[name].of for name in config.names}
    profile = None
    loaded = None
    prompt = None
    prompt_name = ""
    written: list[Path] = []
    artifact = None
    arrays: Mapping[str, np.ndarray] = {}
    if config.artifact is not None:
        artifact, arrays = load_pair(config.artifact)
    if config.profile is not None:
        profile = load_profile(config.profile)
        _check_profile(profile, artifact)
    with out_folder(config.out):
        check_writable(config.out / "similarity.png")
        if config.model is not None:
            with while_importing():
                from profiling.models.device import settled
                from profiling.models.loading import load_model
                from profiling.similarities.layer_similarity import measure
                from runtime.fingerprint import check
            config = settled(config)
            assert config.model is not None
            loaded = load_model(
                config.model, dtype=config.dtype, device=config.device, revision=config.revision
            )
            if artifact is not None:
                check(artifact.model, loaded.model)
            if "model" in origins:
                prompt, prompt_name = _prompt(config, loaded)
            if profile is None and "profile" in origins:
                names = ("length", "seed", "dtype", "device", "command")
                settings = {name: getattr(config, name) for name in names}
                profile = measure(
                    SimilarityConfig(model=config.model, tasks=(config.task,), **settings), loaded
                )
                written += save_profile(profile, config.out)[:1]
        source = Source(
            command=config.command,
            artifact=artifact,
            arrays=arrays,
            profile=profile,
            loaded=loaded,
            prompt=prompt,
            prompt_name=prompt_name,
            head=config.head,
        )
        for name in config.names:
            for drawing in _PICTURES[name].draw(source):
                written += drawing.write(config.out / drawing.name)
    return written


def _check_profile(profile: Profile, artifact: Artifact | None) -> None:
    about = profile.about
    # Weights without a fingerprint are only known by the configuration.
    names = ("weights_sha256", "config_sha256")
    if artifact is not None and any(about[name] != getattr(artifact.model, name) for name in names):
        raise HeadwiseError(
            f"the profile is of {about['model']}, the artifact of {artifact.model.name}: give "
            "those of one model"
        )


def _prompt(config: Config, loaded: LoadedModel) -> tuple[Prompt, str]:
    """Make the prompt; return it with a description."""
    from profiling.prompts.prompt import digest, make_prompts
    from runtime.layers import text_config

    positions = getattr(text_config(loaded.model), "max_position_embeddings", None)
    length = config.length or min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    (prompt,) = make_prompts(
        config.task, loaded.tokenizer, length=length, samples=1, seed=config.seed
    )
    name = config.task.name
    tokens = len(prompt.input_ids)
    return prompt, f"prompt: {name}, {tokens} tokens, seed {config.seed} ({digest([prompt])[:8]})"
