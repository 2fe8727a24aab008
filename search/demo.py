"""headwise demo: the whole of Headwise on a real model in a few minutes.

Searches SmolLM2 as headwise search does, its gate included, loads the artifact in the runtime, and
asks dense attention and Headwise for the same pass key. It takes 8,192 tokens where a search of
them is a matter of minutes on this machine, by a quick measurement, else 4,096; --length sets it.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from artifacts.cli.arguments import Length, ModelName, Out
from artifacts.cli.command import FOUND
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import shorten
from artifacts.files import check_folder, out_folder
from kernels.index import TILE
from kernels.native import build
from profiling.doctor import PREFILLS
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import make_prompts
from profiling.quality.answers import answer, is_right
from profiling.speed.baselines import KERNEL, dense
from profiling.speed.latency import in_turn, prefill
from profiling.speed.layer_times import all_threads
from runtime import load
from runtime.devices import execution_device
from runtime.fingerprint import fingerprint
from runtime.layers import text_config
from search.model.config import ModelSearch
from search.model.report import first_token, report
from search.model.run import SearchRun
from search.model.search import search_model

_MODEL = "smollm2"
# Tokens of the prompts: the first length whose search takes at most _SECONDS.
_LENGTHS = (8192, 4096)
_SECONDS = 150.0
# Tokens of the prompts by which the length is chosen.
_PROBES = (512, 2048)
# Half of the searched length: up to here dense SmolLM2 finds every key.
PASSKEY_LENGTH = 4096
# Of the prompt that is shown: not one of those that were searched on.
_SEED = 1000


class Config(CommandConfig):
    """Config of the demo, and the folder of its files.

    Attributes:
        length: tokens of the prompts; None chooses it by the speed of the machine.
    """

    out: Annotated[Out, Arg("folder for the artifact and the picture", metavar="FOLDER")]
    model: Annotated[ModelName, Arg("as for headwise search (default smollm2)")] = _MODEL
    length: Annotated[
        Length | None,
        Arg("tokens of the prompt (default: 8192 where that takes minutes, else 4096)"),
    ] = None


def demonstrate(config: ModelSearch, loaded: LoadedModel) -> bool:
    """Search, apply and compare; everything lands in the folder of `config.out`.

    Returns:
        Whether the artifact is reliably faster, or was to be kept whatever its speed.

    Raises:
        HeadwiseError: bad input, or no allocation passes the gate.
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
    (prompt,) = make_prompts("passkey", loaded.tokenizer, length=length, samples=1, seed=_SEED)
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


def seconds_of_search(loaded: LoadedModel, length: int) -> float:
    """Estimate the seconds of a default search, by two dense prefills of shorter prompts.

    The time of linear layers grows with the length, that of attention with its square.
    """
    model = loaded.model
    short, long = _PROBES
    ids = torch.zeros(1, long, dtype=torch.long, device=execution_device(model))
    runs = {str(count): partial(prefill, model, ids[:, :count]) for count in _PROBES}
    with all_threads(), dense(model, KERNEL):
        # Compiles the kernels.
        prefill(model, ids[:, :TILE])
        rounds = in_turn(
            runs, repeats=2, device=str(execution_device(model)), warm_up=False, quiet=True
        )
    # The shorter of two rounds: other work on the machine only adds to them.
    seconds = {name: min(taken) for name, taken in rounds.items()}
    times = long / short
    attention = (seconds[str(long)] - times * seconds[str(short)]) / (times**2 - times)
    attention = max(attention, 0.0)
    linear = max(seconds[str(short)] - attention, 0.0)
    times = length / short
    return PREFILLS * (times * linear + times**2 * attention)


def _choose_length(loaded: LoadedModel) -> tuple[int, str]:
    """The tokens of the demo's prompts, and the reason."""
    longest, shorter = _LENGTHS
    positions = getattr(text_config(loaded.model), "max_position_embeddings", None) or longest
    if positions < longest:
        return min(shorter, positions), f"the model has {positions:,} positions"
    seconds = seconds_of_search(loaded, longest)
    minutes = f"about {max(1, round(seconds / 60))} min"
    if seconds <= _SECONDS:
        return longest, f"a search takes {minutes} on this machine"
    return shorter, f"a search at {longest:,} would take {minutes} on this machine"


def _sized(config: ModelSearch, loaded: LoadedModel) -> ModelSearch:
    """Complete the search of a demo without --length; print the length, and why it was chosen."""
    length, why = _choose_length(loaded)
    print(f"searching at {length:,} tokens: {why}", flush=True)
    return config.replace(length=length)


def _command(config: ModelSearch) -> str:
    """The same search as a command."""
    return f"headwise search --model {config.model} --length {config.length} --out {config.out}"


def run(config: Config) -> int:
    """Run the demo: 3 where the artifact is not reliably faster."""
    check_folder(config.out)
    search = settled(
        ModelSearch(model=config.model, out=config.out / "cfg.yaml", length=config.length)
    )
    if search.device == "cpu":
        # The first use compiles the kernels, meanwhile the weights are converted.
        threading.Thread(target=build.load, daemon=True).start()
    loaded = load_model(search.model, dtype=search.dtype, device=search.device)
    if config.length is None:
        search = _sized(search, loaded)
    if demonstrate(search.replace(command=_command(search)), loaded):
        return 0
    return FOUND
