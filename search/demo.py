"""headwise demo: the whole of Headwise on a real model in a few minutes.

Searches SmolLM2 as headwise search does by default, its gate included; loads the artifact in the
runtime, and shows dense attention and Headwise side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from artifacts.cli import arguments
from artifacts.cli.command import FOUND, ArgumentParser, run_command
from artifacts.cli.options import add_arguments, at_least, check_ranges, config_of, option, shared
from artifacts.files import out_folder
from profiling.inside.head_fidelity import fidelity
from profiling.models.device import device_of, settled
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import make_prompts
from profiling.quality.answers import answer
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense, of_rounds, rows, sentence
from profiling.speed.latency import interleaved, medians, prefill
from runtime import load
from runtime.fingerprint import fingerprint
from search.model.config import ModelSearch
from search.model.report import report
from search.model.search import search_model

# Half of what the patterns are searched for: up to here SmolLM2 finds every key itself.
PASSKEY_LENGTH = 4096
# Of the prompts that are shown: not those that were searched on.
_SEED = 1000


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Config of the demo, and the folder of its files."""

    out: Path = shared(
        arguments.add_out,
        "folder for the artifact and the picture",
        metavar="FOLDER",
    )
    model: str = shared(
        arguments.add_model,
        "as for headwise search (default smollm2)",
        required=False,
        default="smollm2",
    )
    length: int = shared(
        arguments.add_length,
        "tokens of the prompt (default %(default)s)",
        default=8192,
    )
    repeats: int = option("timed runs of each side", default=2, within=at_least(1))

    def __post_init__(self) -> None:
        check_ranges(self)


def run(config: ModelSearch, *, repeats: int) -> bool:
    """Search, apply and compare; everything lands in the folder of `config.out`.

    Returns:
        Whether there is an artifact to compare: one that is not worth serving is not written.

    Raises:
        HeadwiseError: anything that the user has to put right, or the gate, that nothing passes.
    """
    config = settled(config)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    print(f"$ {config.command}", flush=True)
    with out_folder(config.out.parent):
        recorded = search_model(config, loaded, model)
        assert recorded is not None, "there is one process"
        print(report(config, recorded))
        if recorded.written:
            _compared(loaded, config.out, recorded.outcome.run.length, repeats)
    return recorded.written


def _compared(loaded: LoadedModel, config: Path, length: int, repeats: int) -> None:
    """Print times of prefills, the artifact's density and recall, and answers to a pass key."""
    model = loaded.model
    headwise = load(config)
    (prompt,) = make_prompts("passkey", loaded.tokenizer, length=length, samples=1, seed=_SEED)
    kept = fidelity(model, headwise.artifact, prompt, headwise.arrays)
    ids = torch.tensor([prompt.input_ids], dtype=torch.long, device=model.device)
    methods = {name: partial(dense, model, name) for name in (MODEL, KERNEL)} | {
        HEADWISE: partial(headwise.apply, model)
    }
    seconds = interleaved(
        methods, lambda: prefill(model, ids), repeats=repeats, device=device_of(model)
    )
    print(
        f"\nseconds to the first token after {length:,} tokens, median of {repeats} interleaved "
        "runs\n"
    )
    print("\n".join(rows(medians(seconds))))
    print(f"Headwise is {sentence(of_rounds(seconds, HEADWISE))}")
    density = np.nanmean(kept.density)
    recall = np.nanmean(kept.recall)
    print(f"it computes {density:.3f} of the tiles and keeps {recall:.3f} of the attention mass")
    asked = min(PASSKEY_LENGTH, length)
    (key,) = make_prompts("passkey", loaded.tokenizer, length=asked, samples=1, seed=_SEED)
    print(f"\npasskey in {asked} tokens: {key.answer}")
    for name in (MODEL, HEADWISE):
        with methods[name]():
            print(f"  {name:<9} answers {answer(model, loaded.tokenizer, key)}")
    print(f"\npattern of each layer and head: {config.with_suffix('.png')} (also .svg and .csv)")


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    demo = config_of(Demo, vars(parser().parse_args(argv)))
    out = demo.out / "cfg.yaml"
    command = f"headwise search --model {demo.model} --length {demo.length} --out {out}"
    config = ModelSearch(model=demo.model, out=out, lengths=(demo.length,), command=command)
    if run(config, repeats=demo.repeats):
        return 0
    return FOUND


def parser() -> ArgumentParser:
    """The command line of headwise demo."""
    p = ArgumentParser(prog="headwise demo", description=__doc__)
    add_arguments(p, Demo)
    return p


if __name__ == "__main__":
    run_command(main)
