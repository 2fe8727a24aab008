"""headwise demo: the whole of Headwise on a real model in a few minutes.

Searches SmolLM2 as headwise search does, its gate included, loads the artifact in the runtime, and
asks dense attention and Headwise for the same pass key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from artifacts.cli.arguments import Length, ModelName, Out
from artifacts.cli.command import FOUND
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import shorten
from artifacts.files import check_folder, out_folder
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Task, make_prompts
from profiling.quality.answers import answer, is_right
from runtime import load
from runtime.fingerprint import fingerprint
from search.model.config import ModelSearch
from search.model.report import first_token, report
from search.model.run import SearchRun
from search.model.search import search_model

# Up to half of the searched length dense SmolLM2 finds every key.
PASSKEY_LENGTH = 4096
# Of the prompt that is shown: not one of those that were searched on.
_SEED = 1000


class Config(CommandConfig):
    """Config of the demo, and the folder of its files."""

    out: Annotated[Out, Arg("folder for the artifact and the picture", metavar="FOLDER")]
    model: Annotated[ModelName, Arg("as for headwise search (default smollm2)")] = "smollm2"
    length: Annotated[Length, Arg("tokens of the prompts (default 4096)")] = 4096


def run(config: Config) -> int:
    """Run the demo: 3 where the artifact is not reliably faster."""
    check_folder(config.out)
    out = config.out / "cfg.yaml"
    command = f"headwise search --model {config.model} --length {config.length} --out {out}"
    search = settled(
        ModelSearch(model=config.model, out=out, length=config.length, command=command)
    )
    loaded = load_model(search.model, dtype=search.dtype, device=search.device)
    if demonstrate(search, loaded):
        return 0
    return FOUND


def demonstrate(config: ModelSearch, loaded: LoadedModel) -> bool:
    """Search, apply and compare; everything lands in the folder of `config.out`.

    Returns:
        Whether the artifact is reliably faster, or was to be kept whatever its speed.
    """
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    print(f"$ {config.command}", flush=True)
    with out_folder(config.out.parent):
        search = search_model(config, loaded, model)
        assert search is not None, "there is one process"
        print(report(config, search))
        if search.written:
            print("\n".join(["", *_summary(loaded, config, search)]))
    is_useful = search.is_reliably_faster and search.accepted.proof.verdict.proven
    return is_useful or config.keep


def _summary(loaded: LoadedModel, config: ModelSearch, search: SearchRun) -> list[str]:
    """The pass key, the picture, and the time to the first token with its loss, a line each."""
    lines = [_pass_key(loaded, config.out, min(PASSKEY_LENGTH, search.length))]
    if config.picture:
        lines.append(f"picture of the patterns: {config.out.with_suffix('.png')}")
    if search.prefills:
        # The result once more, as the last line.
        losses = search.accepted.proof.verdict.losses
        lines.append(f"{first_token(search.prefills)} at {search.length:,} tokens; {losses}")
    return lines


def _pass_key(loaded: LoadedModel, config: Path, length: int) -> str:
    """Answers of dense attention and of the artifact to a pass key."""
    (prompt,) = make_prompts(
        Task("passkey"), loaded.tokenizer, length=length, samples=1, seed=_SEED
    )
    answers = {"dense attention": answer(loaded.model, loaded.tokenizer, prompt)}
    with load(config).apply(loaded.model):
        answers["Headwise"] = answer(loaded.model, loaded.tokenizer, prompt)
    right = {name: is_right(prompt, text) for name, text in answers.items()}
    hidden = f"pass key {prompt.answer} hidden in {length:,} tokens:"
    if all(right.values()):
        return f"{hidden} found by both, {' and '.join(answers)}"
    parts = [
        f"found by {name}" if right[name] else f"not found by {name}, which answers {shorten(text)}"
        for name, text in answers.items()
    ]
    return f"{hidden} {', '.join(parts)}"
