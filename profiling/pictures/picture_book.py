"""The pictures of headwise heatmaps by name; loads or measures their data once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np

from artifacts import Artifact, HeadwiseError, load_pair
from artifacts.files import check_writable, out_folder
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.pictures.config import PICTURES, Heatmaps
from profiling.pictures.head_survey import Survey, check_heads, survey
from profiling.pictures.layer_pictures import draw_layers
from profiling.pictures.model_pictures import draw_grid, draw_maps, some_heads, typical_heads
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task
from profiling.similarities.config import DEFAULT_LENGTH, SimilarityConfig
from profiling.similarities.layer_similarity import measure
from profiling.similarities.similarity_profile import load_profile, save_profile
from runtime.fingerprint import check
from runtime.layers import attention_layers, full_layers, text_config


def run(config: Heatmaps) -> list[Path]:
    """Draw into the folder `config.out` and return the files.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    if config.model is not None:
        config = settled(config)
    with out_folder(config.out):
        check_writable(config.out / "similarity.png")
        book = PictureBook(config)
        wanted = config.pictures or (PICTURES if config.model else ("layers",))
        return [path for name in PICTURES if name in wanted for path in getattr(book, name)()]


class PictureBook:
    """The pictures by name; what several of them need is loaded or measured once."""

    def __init__(self, config: Heatmaps) -> None:
        self._config = config
        if config.profile is None:
            self._profile = None
        else:
            self._profile = load_profile(config.profile)
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
        if self._artifact is not None:
            decode = self._artifact.decode
        else:
            decode = None
        if decode is None:
            section = None
        else:
            section = decode.omnikv
        return written + draw_layers(self._profile, config.out, config.command, section)

    def maps(self) -> list[Path]:
        return draw_maps(
            self._config.out, self._survey.maps, self._caption(self._prompted, *self._served)
        )

    def sparsity(self) -> list[Path]:
        out = self._config.out
        label = "fraction of entries below\n1% of the row's largest"
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
            prompts = f"as searched on {tasks}, {calibration.length} tokens"
            skipped = 1 - self._arrays["chosen.density"]
            label = "fraction of tiles\nnot computed"
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
            full = full_layers(attention_layers(self._loaded.model))
            if not full:
                raise HeadwiseError(f"no layer of {self._loaded.name} sees every token of a prompt")
            heads = tuple(some_heads(full, text_config(self._loaded.model).num_attention_heads))
        return survey(self._loaded, self._prompt, heads, self._artifact)

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
