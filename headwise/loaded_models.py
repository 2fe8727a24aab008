"""Search, gate and evaluate a model object, as the commands do for a model's name.

Each call imports the modules that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from search.gate import GateResult
    from search.model.run import SearchRun


def search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    out: str | Path,
    name: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> SearchRun | None:
    """Find a pattern for every head of a loaded model, as `headwise search` does.

    Args:
        model: a causal language model of transformers, on its device. Its state is restored,
            also after an error.
        tokenizer: its tokenizer.
        out: the artifact to write; an interrupted search resumes from the file next to it.
        name: of the model, in the artifact; None for its own.
        revision: of the model on the hub; None for the one that it was loaded from.
        options: fields of search.model.config.ModelSearch and of its limits, such as
            length=4096, max_lost=0.03, cost="flops".

    Returns:
        The run, with its artifact, losses and speed; `written` is False where serving it gains too
        little, and `is_reliably_faster` where noise hides whether it is faster. None in ranks of
        torchrun after the first.

    Raises:
        HeadwiseError: an option is unknown, or anything that the command refuses.
    """
    from artifacts.cli.options import config_by_name
    from profiling.models.device import device_of, dtype_of
    from profiling.models.preloaded import preloaded_model
    from search.model.config import ModelSearch
    from search.model.search import run

    with preloaded_model(model, tokenizer, name=name, revision=revision) as loaded:
        config = config_by_name(
            ModelSearch,
            options,
            model=loaded.name,
            revision=loaded.revision,
            out=Path(out),
            dtype=dtype_of(model),
            device=device_of(model),
            max_memory=None,
            preset=None,
            command=_call("search", {"out": str(out), **options}),
        )
        return run(config, loaded)


def gate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    artifact: str | Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> GateResult:
    """Measure an artifact's losses on held-out prompts, as `headwise gate` does.

    Args:
        model: as for `search`.
        tokenizer: its tokenizer.
        artifact: the YAML file.
        name: of the model, in an artifact that is written for it; None for its own.
        revision: of the model on the hub; None for the one that it was loaded from.
        options: fields of search.gate.Config and of its limits, such as length=4096,
            max_lost=0.03; out="new.yaml" writes an artifact that passes for this model.

    Returns:
        The losses of each task; `passes` is True if they are proven to be within the limits.

    Raises:
        HeadwiseError: an option is unknown, the model is another one than the artifact's, or
            anything that the command refuses.
    """
    from artifacts.cli.options import config_by_name
    from profiling.models.device import device_of, dtype_of
    from profiling.models.preloaded import preloaded_model
    from search.gate import Config, measure

    with preloaded_model(model, tokenizer, name=name, revision=revision) as loaded:
        config = config_by_name(
            Config,
            options,
            artifact=Path(artifact),
            model=loaded.name,
            dtype=dtype_of(model),
            device=device_of(model),
            as_json=None,
        )
        return measure(config, loaded)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    artifact: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    name: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure accuracy and speed of artifacts and other methods, as `headwise evaluate` does.

    Peak memory is left out: it is measured in processes that load the model by its name.

    Args:
        model: as for `search`.
        tokenizer: its tokenizer.
        artifact: the YAML file, or several.
        out: the folder of the report; an interrupted evaluation resumes from the file in it.
        name: of the model, in the report; None for its own.
        revision: of the model on the hub; None for the one that it was loaded from.
        options: fields of profiling.evaluation.config.Config, such as length=4096, quick=True,
            tasks=("passkey", "prose"), speed=False.

    Returns:
        The content of evaluation.json.

    Raises:
        HeadwiseError: an option is unknown, the model is another one than an artifact's, or
            anything that the command refuses.
    """
    from artifacts.cli.options import config_by_name
    from profiling.evaluation.config import Config
    from profiling.evaluation.run import run
    from profiling.models.device import device_of, dtype_of
    from profiling.models.preloaded import preloaded_model

    artifacts = [artifact] if isinstance(artifact, str | Path) else artifact
    with preloaded_model(model, tokenizer, name=name, revision=revision) as loaded:
        config = config_by_name(
            Config,
            options,
            configs=tuple(map(Path, artifacts)),
            model=loaded.name,
            revision=loaded.revision,
            out=Path(out),
            dtype=dtype_of(model),
            device=device_of(model),
            memory=False,
            command=_call("evaluate", {"out": str(out), **options}),
        )
        return run(config, loaded).as_json()


def _call(function: str, options: dict[str, Any]) -> str:
    """The call, as records show it in place of a command line."""
    from artifacts.cli.passwords import without_password

    shown = {
        name: without_password(value) if isinstance(value, str) else value
        for name, value in options.items()
    }
    arguments = "".join(f", {name}={value!r}" for name, value in shown.items())
    return f"headwise.{function}(model, tokenizer{arguments})"
