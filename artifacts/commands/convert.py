"""Read another tool's file into an artifact, or write one from it."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from artifacts.analysis.sections import put_section
from artifacts.cli.arguments import Json, deliver
from artifacts.cli.command import FOUND
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import ArtifactError, naming, one_line
from artifacts.files import atomic_write, check_writable
from artifacts.interop.format import Format
from artifacts.interop.formats import FORMATS, guess
from artifacts.interop.report import Report
from artifacts.interop.shape import ImportOptions
from artifacts.interop.source import Source
from artifacts.store.read import read_pair
from artifacts.store.write import save, update

EXAMPLES = f"""\
FILE is another tool's file, and OUT an artifact; or, with --to, FILE is an artifact and OUT the
tool's file. With --into the section that FILE is about replaces that of an artifact, which keeps
its others; the model's shape is then the artifact's.

formats:
{"".join(f"  {name:<24} {form.about}" + chr(10) for name, form in FORMATS.items())}
The report says how many heads are the same on both sides, and what happens to the others:

  same              another form, the same effect
  computes more     nothing is lost but time
  keeps less, chooses otherwise, not carried over, filled in
                    it can cost recall; the report ends with the command that measures how much

The exit status is 0, or with --strict 3 where anything is lost; then nothing is written.

The model's shape comes from the file, its config.json (--config) or flags. Other facts,
such as a hash of the weights, are left open and not compared when the artifact is applied.

examples:
  headwise convert best_pattern.json --config Llama-3-8B/config.json --out cfg.yaml
  headwise convert best_pattern.json --kv-heads 8 --head-dim 128 --max-positions 262144 \\
      --model my/Llama-3-8B --out cfg.yaml
  headwise convert cfg.yaml --to minference --out best_pattern.json
  headwise convert full_attention_heads.tsv --config Llama-3-8B --sparsity 0.5 --out kv.yaml
  headwise convert full_attention_heads.tsv --sparsity 0.5 --into cfg.yaml
"""
_MODEL = "the model, for imports (facts missing from the file)"
_HOW = "how an import is read"


class Config(CommandConfig):
    """Files to read and write, and options for the model; None for a missing option."""

    file: Annotated[
        Path, Arg("another tool's file, or with --to an artifact's YAML", metavar="FILE", flags=())
    ]
    out: Annotated[
        Path | None,
        Arg("the artifact's YAML file, or with --to the tool's file", either="out", metavar="FILE"),
    ] = None
    into: Annotated[
        Path | None,
        Arg(
            "put the section into this artifact, which keeps its others",
            either="out",
            metavar="FILE",
        ),
    ] = None
    source: Annotated[
        str | None,
        Arg("what FILE is (default: by its name)", choices=tuple(FORMATS), flags=("--from",)),
    ] = None
    target: Annotated[
        str | None,
        Arg("write this from the artifact FILE", choices=tuple(FORMATS), flags=("--to",)),
    ] = None
    config: Annotated[
        Path | None, Arg("its config.json, or its folder", group=_MODEL, metavar="PATH")
    ] = None
    model: Annotated[
        str | None,
        Arg("its name; the command that measures takes it, too", group=_MODEL, metavar="NAME"),
    ] = None
    revision: Annotated[str | None, Arg("its revision on the hub", group=_MODEL, metavar="REV")] = (
        None
    )
    layers: Annotated[int | None, Arg("layers", group=_MODEL)] = None
    heads: Annotated[int | None, Arg("query heads a layer", group=_MODEL)] = None
    kv_heads: Annotated[int | None, Arg("KV heads a layer", group=_MODEL)] = None
    head_dim: Annotated[int | None, Arg("channels a head", group=_MODEL)] = None
    max_positions: Annotated[int | None, Arg("the longest prompt, in tokens", group=_MODEL)] = None
    dense_below: Annotated[
        int | None, Arg("serve shorter prompts densely", group=_HOW), Field(ge=0)
    ] = None
    dense_tail: Annotated[
        int | None, Arg("last queries that see every key (0)", group=_HOW), Field(ge=0)
    ] = None
    sinks: Annotated[
        int | None, Arg("first tokens a streaming head keeps (128)", group=_HOW), Field(ge=0)
    ] = None
    window: Annotated[
        int | None,
        Arg("last tokens a streaming head sees, itself one (257)", group=_HOW),
        Field(ge=1),
    ] = None
    threshold: Annotated[
        float | None, Arg("KV heads from here on keep all (0.5)", group=_HOW), Field(ge=0, le=1)
    ] = None
    sparsity: Annotated[
        float | None,
        Arg("instead, the fraction of them that stream", group=_HOW),
        Field(ge=0, le=1),
    ] = None
    strict: Annotated[bool, Arg("write nothing, exit with 3, if more than time is lost")] = False
    as_json: Json = None


def run(config: Config) -> int:
    """Convert the file and report the fidelity; 3 if --strict and something is lost.

    Raises:
        HeadwiseError: FILE is not in the expected format, or OUT cannot be written.
    """
    _check(config)
    out = config.into or config.out
    if out is None:
        raise ArtifactError("give --out FILE or --into FILE")
    check_writable(out)
    if config.target:
        report, wrote = _export(config, out, FORMATS[config.target])
    else:
        report, wrote = _import(config, out)
    lost = config.strict and report.lossy
    if lost:
        first = "wrote nothing: --strict, and something is lost"
    else:
        first = f"wrote {', '.join(wrote)}"
    facts = {"wrote": wrote, "report": report.as_json()}
    deliver("\n".join(map(one_line, [first, *report.lines()])), facts, config.as_json)
    return FOUND if lost else 0


def _check(config: Config) -> None:
    if config.target and config.source:
        raise ArtifactError("give --from for an import or --to for an export, not both")
    if config.target and config.into:
        raise ArtifactError("--into is for imports: give --out with --to")
    if config.threshold is not None and config.sparsity is not None:
        raise ArtifactError("give --threshold or --sparsity, not both")


def _import(config: Config, out: Path) -> tuple[Report, list[str]]:
    source = config.source or guess(config.file)
    form = FORMATS[source]
    for name in ("dense_below", "dense_tail", "sinks", "window", "threshold", "sparsity"):
        if name not in form.options and getattr(config, name) is not None:
            raise ArtifactError(f"--{name.replace('_', '-')} means nothing for {source}")
    model_options = _import_options(config)
    file = Source.read(config.file)
    with naming(config.file):
        imported = form.read(file, model_options)
    report = replace(imported.report, measure=_measure(config, form, out, None))
    if config.strict and report.lossy:
        return report, []
    if config.into:
        saved = update(out, partial(put_section, imported.artifact, imported.arrays))
    else:
        saved = save(imported.artifact, out, imported.arrays)
    if saved.sidecar:
        sidecars = [str(out.with_name(saved.sidecar.file))]
    else:
        sidecars = []
    return report, [str(out), *sidecars]


def _import_options(config: Config) -> ImportOptions:
    """Return the model options from the flags, and with --into from the artifact."""
    values = {each.name: getattr(config, each.name) for each in fields(ImportOptions)}
    if config.into:
        model = read_pair(config.into).artifact.model
        sizes = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        values |= {name.removeprefix("num_"): getattr(model, name) for name in sizes}
    return ImportOptions(**values)


def _export(config: Config, out: Path, form: Format) -> tuple[Report, list[str]]:
    pair = read_pair(config.file)
    exported = form.write(pair.artifact, pair.arrays, out)
    model = pair.artifact.model
    flags = (
        f"--layers {model.num_layers} --heads {model.num_heads} --kv-heads {model.num_kv_heads} "
        f"--head-dim {model.head_dim} --max-positions {model.max_positions}"
    )
    report = replace(exported.report, measure=_measure(config, form, config.file, flags))
    if config.strict and report.lossy:
        return report, []
    for path, content in exported.files.items():
        atomic_write(path, content)
    return report, list(map(str, exported.files))


def _measure(config: Config, form: Format, artifact: Path, flags: str | None) -> str:
    """Return the shell line that measures the cost of an import, or of an export read back."""
    if not form.patterns:
        return ""
    if config.model:
        model = shlex.quote(config.model)
    else:
        model = "MODEL"
    run = f"headwise evaluate {shlex.quote(str(artifact))}"
    options = f"--model {model} --no-speed --out report/"
    if flags is None:
        return f"measure it with: {run} {options}"
    back = (
        f"headwise convert {shlex.quote(str(config.out))} --from "
        f"{config.target} {flags} --out back.yaml"
    )
    return f"measure its cost with: {one_line(back)} && {run} back.yaml {options}"
