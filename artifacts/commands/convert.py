"""convert: other tools' files into artifacts, and artifacts into theirs, with a report of what does not fit."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from artifacts.commands import FOUND, Outcome, add_json, add_out
from artifacts.errors import ArtifactError, one_line
from artifacts.files import atomic_write, check_writable
from artifacts.interop.duo import import_duo, is_duo_config
from artifacts.interop.duo_export import export_duo
from artifacts.interop.files import parse_json, read_bytes
from artifacts.interop.head_export import export_heads
from artifacts.interop.head_import import Conversion, import_heads
from artifacts.interop.report import Report
from artifacts.interop.shape import Given
from artifacts.store import load_pair, save

SHORT = "read MInference's, vLLM's, SGLang's or DuoAttention's file into an artifact, or write one from it"
EXAMPLES = """\
FILE is another tool's file, and OUT an artifact; or, with --to, FILE is an artifact and OUT the tool's file.

formats:
  minference               MInference's JSON list of head patterns: vertical_and_slash, stream_llm,
                           block_sparse, flex_vertical_and_slash
  sparse_attention_config  the same list as vLLM and SGLang read it: sparse_attention_config.json,
                           vertical_and_slash only
  duo_attention            DuoAttention's full_attention_heads.tsv with its config.json beside it,
                           into and from the kv_cache section

The report says how many heads are the same on both sides, and what becomes of the others:
  same              another form, the same effect
  computes more     nothing is lost but time
  keeps less, chooses otherwise, not carried over, filled in
                    it can cost recall; the report ends with the command that measures how much
The exit status is 0, or with --strict 1 where anything is lost; then nothing is written.

The model's shape comes from the file, its config.json (--config) or flags; what an import cannot know,
such as the weights, is left open and not compared when the artifact is applied.

examples:
  python -m artifacts convert best_pattern.json --config Llama-3-8B/config.json --out cfg.yaml
  python -m artifacts convert best_pattern.json --kv-heads 8 --head-dim 128 --max-positions 262144 \\
      --model my/Llama-3-8B --out cfg.yaml
  python -m artifacts convert cfg.yaml --to sparse_attention_config --out sparse_attention_config.json
  python -m artifacts convert full_attention_heads.tsv --config Llama-3-8B --sparsity 0.5 --out kv.yaml
  python -m artifacts merge --prefill cfg.yaml --kv-cache kv.yaml --out both.yaml
"""
Format = Literal["minference", "sparse_attention_config", "duo_attention"]
FORMATS: tuple[Format, ...] = get_args(Format)
# Of the options that say how to read another tool's file, those that only DuoAttention's knows.
_DUO = ("sinks", "window", "threshold", "sparsity")
_HEADS = ("dense_below", "dense_tail")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which file into which, and what is known of the model; None where not given."""

    file: Path
    out: Path
    source: Format | None = None
    target: Format | None = None
    config: Path | None = None
    model: str | None = None
    revision: str | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int | None = None
    dense_below: int | None = None
    dense_tail: int | None = None
    sinks: int | None = None
    window: int | None = None
    threshold: float | None = None
    sparsity: float | None = None
    strict: bool = False
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    parser.add_argument("file", metavar="FILE", type=Path, help="another tool's file, or with --to an artifact's YAML")
    add_out(parser, "the artifact's YAML file, or with --to the tool's file")
    parser.add_argument("--from", dest="source", choices=FORMATS, help="what FILE is (told by its name and content)")
    parser.add_argument("--to", dest="target", choices=FORMATS, help="write this from the artifact FILE")
    model = parser.add_argument_group("the model, for imports (what the file does not say)")
    model.add_argument("--config", metavar="PATH", type=Path, help="the model's config.json, or its folder")
    model.add_argument("--model", metavar="NAME", help="its name as the artifact shall have it")
    model.add_argument("--revision", metavar="REV", help="its revision on the hub")
    for flag, what in (
        ("--layers", "layers"),
        ("--heads", "query heads a layer"),
        ("--kv-heads", "KV heads a layer"),
        ("--head-dim", "channels a head"),
        ("--max-positions", "the longest prompt, in tokens"),
    ):
        model.add_argument(flag, metavar="N", type=int, help=what)
    heads = parser.add_argument_group("imports of head patterns")
    heads.add_argument("--dense-below", metavar="N", type=int, help="serve shorter prompts densely, in tokens")
    heads.add_argument("--dense-tail", metavar="N", type=int, help="last queries that see every key (0: none)")
    duo = parser.add_argument_group("imports of duo_attention")
    duo.add_argument("--sinks", metavar="N", type=int, help="first tokens a streaming head keeps (128)")
    duo.add_argument("--window", metavar="N", type=int, help="last tokens a streaming head keeps (256)")
    duo.add_argument("--threshold", metavar="X", type=float, help="heads from this value on keep everything (0.5)")
    duo.add_argument("--sparsity", metavar="X", type=float, help="instead, the share of heads that stream")
    parser.add_argument(
        "--strict", action="store_true", help="write nothing, exit with 1, if anything is lost but time"
    )
    add_json(parser)


def run(config: Config) -> Outcome:
    """Convert, and report.

    Raises:
        HeadwiseError: FILE cannot be read as what it should be, or OUT cannot be written.
    """
    _check(config)
    check_writable(config.out)
    report, wrote = _export(config) if config.target else _import(config)
    lost = config.strict and report.lossy
    if config.as_json:
        return Outcome(
            text=json.dumps({"wrote": wrote, "report": report.as_json()}) + "\n", status=FOUND if lost else 0
        )
    first = "wrote nothing: --strict, and something is lost" if lost else f"wrote {', '.join(wrote)}"
    lines = [one_line(line) for line in (first, *report.lines())]
    return Outcome(text="\n".join(lines) + "\n", status=FOUND if lost else 0)


def _check(config: Config) -> None:
    if config.target and config.source:
        raise ArtifactError("give --from for an import or --to for an export, not both")
    for name in ("sinks", "dense_below", "dense_tail"):
        if (getattr(config, name) or 0) < 0:
            raise ArtifactError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(config, name)}")
    if config.window is not None and config.window < 1:
        raise ArtifactError(f"--window must be at least 1, got {config.window}")
    for name in ("threshold", "sparsity"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise ArtifactError(f"--{name} must be from 0 to 1, got {value}")


def _import(config: Config) -> tuple[Report, list[str]]:
    source = config.source or _guess(config.file)
    for names, others in ((_HEADS, source == "duo_attention"), (_DUO, source != "duo_attention")):
        if others and (wrong := [name for name in names if getattr(config, name) is not None]):
            raise ArtifactError(f"--{wrong[0].replace('_', '-')} means nothing for {source}")
    made = _read(config, source)
    report = replace(made.report, measure=_measure(config, config.out, None))
    if config.strict and report.lossy:
        return report, []
    saved = save(made.artifact, config.out, made.arrays)
    beside = [str(config.out.with_name(saved.sidecar.file))] if saved.sidecar else []
    return report, [str(config.out), *beside]


def _read(config: Config, source: Format) -> Conversion:
    given = Given(
        config=config.config,
        name=config.model,
        revision=config.revision,
        num_layers=config.layers,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_positions=config.max_positions,
    )
    if source == "duo_attention":
        return import_duo(
            config.file,
            given,
            sinks=config.sinks,
            window=config.window,
            threshold=config.threshold,
            sparsity=config.sparsity,
        )
    return import_heads(config.file, source, given, dense_below=config.dense_below, dense_tail=config.dense_tail or 0)


def _guess(file: Path) -> Format:
    if file.suffix == ".tsv":
        return "duo_attention"
    if file.suffix in (".yaml", ".yml"):
        raise ArtifactError(f"{one_line(str(file))}: is an artifact by its name: say with --to what to write from it")
    return "sparse_attention_config" if file.name == "sparse_attention_config.json" else "minference"


def _export(config: Config) -> tuple[Report, list[str]]:
    assert config.target is not None
    artifact, arrays = load_pair(config.file)
    if config.target == "duo_attention":
        table, sizes, report = export_duo(artifact, arrays)
        beside = config.out.with_name("config.json")
        if beside.exists() and not is_duo_config(parse_json(beside, read_bytes(beside))):
            raise ArtifactError(
                f"{one_line(str(beside))}: is there and not DuoAttention's: write the table into a folder of its own"
            )
        files = [(config.out, table), (beside, sizes)]
    else:
        data, report = export_heads(artifact, arrays, config.target)
        files = [(config.out, data)]
    model = artifact.model
    flags = (
        f"--kv-heads {model.num_kv_heads} --head-dim {model.head_dim} --max-positions {model.max_positions}"
        if config.target != "duo_attention"
        else f"--heads {model.num_heads} --head-dim {model.head_dim} --max-positions {model.max_positions}"
    )
    report = replace(report, measure=_measure(config, config.file, flags))
    if config.strict and report.lossy:
        return report, []
    for path, content in files:
        atomic_write(path, content)
    return report, [str(path) for path, _ in files]


def _measure(config: Config, artifact: Path, flags: str | None) -> str:
    """How recall is measured: of an import as it is; of an export against what the tool makes of it."""
    if "duo_attention" in (config.target, config.source) or (not config.target and config.file.suffix == ".tsv"):
        return ""
    run = f"python -m profiling.fidelity {shlex.quote(str(artifact))} --model MODEL"
    if flags is None:
        return f"measure it with: {run}"
    back = f"python -m artifacts convert {shlex.quote(str(config.out))} --from {config.target} {flags} --out back.yaml"
    return f"measure what it costs with: {back} && {run} --against back.yaml"
