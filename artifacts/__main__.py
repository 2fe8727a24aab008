"""python -m artifacts: look at an artifact, or check that it is whole.

`show` reads the YAML and prints it as a page, which also says if the sidecar is missing or changed.
`validate` checks both files and exits with status 2 if anything is wrong.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from artifacts.command_line import ArgumentParser, run_command
from artifacts.errors import ArtifactError, one_line
from artifacts.page import render
from artifacts.store import load, load_arrays, load_pair

_EPILOG = """\
An artifact is what `python -m search.heads` writes: FILE.yaml, to be read and diffed, and a
.safetensors file beside it. Move or copy the two together, and keep their names.

examples:
  python -m artifacts show cfg.yaml                  a page: model, search, winners, layer map, evidence
  python -m artifacts show cfg.yaml --json           the whole artifact as one JSON object
  python -m artifacts validate cfg.yaml              one line; exit status 0 if whole, 2 if not
"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to do with which file."""

    action: Literal["show", "validate"]
    file: Path
    as_json: bool = False


def run(config: Command) -> str:
    """What the command prints.

    Raises:
        ArtifactError: the artifact is not as it should be; for `show` only if the YAML file is not.
    """
    return _show(config) if config.action == "show" else _validate(config)


def _show(config: Command) -> str:
    artifact = load(config.file, check_sidecar=False)
    if config.as_json:
        return artifact.model_dump_json() + "\n"
    width = min(max(shutil.get_terminal_size((96, 24)).columns, 80), 100)
    if artifact.sidecar is None:
        return render(artifact, file=config.file.name, arrays={}, sidecar="none", width=width)
    try:
        arrays = load_arrays(config.file)
        state = f"{artifact.sidecar.file} (arrays: {len(arrays)})"
    except ArtifactError as error:
        # The page needs only the YAML, which may well travel without its arrays.
        arrays, state = {}, f"PROBLEM: {error}"
    return render(artifact, file=config.file.name, arrays=arrays, sidecar=state, width=width)


def _validate(config: Command) -> str:
    artifact, arrays = load_pair(config.file)
    file = artifact.sidecar.file if artifact.sidecar else None
    if config.as_json:
        shapes = {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in sorted(arrays.items())}
        whole = {
            "valid": True,
            "file": str(config.file),
            "schema_version": artifact.schema_version,
            "content_sha256": artifact.content_sha256,
            "sidecar": file,
            "arrays": shapes,
        }
        return json.dumps(whole) + "\n"
    beside = f"sidecar {file}, arrays: {len(arrays)}" if file else "no sidecar"
    facts = f"schema {artifact.schema_version}, content {artifact.content_sha256[:12]}, {beside}"
    return one_line(f"ok: {config.file} ({facts})") + "\n"


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and print what run() gives."""
    args = _parser().parse_args(argv)
    sys.stdout.write(run(Command(action=args.action, file=args.file, as_json=args.json)))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m artifacts",
        description="Look at a Headwise artifact, or check that it is whole.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", metavar="{show,validate}", required=True)
    for name, short in (
        ("show", "print it as a page: model, search, winners by kind, layer map, evidence"),
        ("validate", "check fields, hashes and sidecar; exit status 2 and one line if anything is wrong"),
    ):
        action = actions.add_parser(name, help=short, description=short.capitalize() + ".")
        action.add_argument("file", metavar="FILE", type=Path, help="the artifact's YAML file, such as cfg.yaml")
        action.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    return parser


if __name__ == "__main__":
    run_command(main)
