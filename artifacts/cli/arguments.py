"""Arguments that several commands share, each declared once.

A command adds arguments to its parser: `add_model(p)` adds --model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from artifacts.cli.command import ArgumentParser, natural
from artifacts.errors import HeadwiseError

MODEL = "hub id, local folder, GGUF file, smollm2 or gemma3"
_DTYPE_DEFAULT = "bfloat16; float32 on a CPU without it"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
JSON = "print one JSON object in place of the text, or write it to FILE"
TASKS = "headwise tasks lists them"
# --json without a file.
STDOUT = Path("-")


def add_artifact(
    p: ArgumentParser,
    help: str = "artifact, such as cfg.yaml",
    *,
    dest: str = "config",
    nargs: str | None = None,
) -> None:
    """Add the positional argument for the artifact's YAML file; `nargs` as in argparse."""
    p.add_argument(dest, metavar="ARTIFACT", type=Path, nargs=nargs, help=help)


def add_model(
    p: ArgumentParser, help: str = MODEL, *, required: bool = True, default: str | None = None
) -> None:
    """Add --model; a default makes it optional."""
    p.add_argument(
        "--model",
        metavar="MODEL",
        required=required and default is None,
        default=default,
        help=help,
    )


def add_length(
    p: ArgumentParser,
    help: str = "tokens of a prompt",
    *,
    several: bool = False,
    required: bool = False,
    dest: str = "length",
    default: int | Sequence[int] | None = None,
) -> None:
    """Add --length in tokens; with `several` it is a list."""
    keywords: dict[str, Any] = {"required": required, "default": default}
    if several:
        keywords["nargs"] = "+"
    p.add_argument("--length", dest=dest, metavar="N", type=natural, help=help, **keywords)


def add_task(
    p: ArgumentParser,
    help: str,
    *,
    several: bool = True,
    dest: str = "tasks",
    default: str | None = None,
) -> None:
    """Add --task with parameters, such as passkey@depth=0.5 or text:FILE.

    Args:
        several: the option is repeatable, and its value is a list or None.
    """
    if several:
        p.add_argument(
            "--task",
            dest=dest,
            metavar="TASK",
            action="append",
            help=f"{help}; {TASKS}; repeatable",
        )
    else:
        p.add_argument("--task", metavar="TASK", default=default, help=help)


def add_out(p: ArgumentParser, help: str, *, metavar: str = "FILE", required: bool = True) -> None:
    """Add --out, the file to write."""
    p.add_argument("--out", metavar=metavar, type=Path, required=required, help=help)


def add_json(p: ArgumentParser) -> None:
    """Add --json [FILE]: None, STDOUT or a writable file; without .json use `--json=FILE`."""
    p.add_argument("--json", metavar="FILE", nargs="?", type=json_file, const=STDOUT, help=JSON)


def add_fresh(p: ArgumentParser) -> None:
    """Add --fresh, for a command that resumes an interrupted run."""
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")


def add_backend(p: ArgumentParser) -> None:
    """Add --backend, the attention backend."""
    p.add_argument(
        "--backend", default="auto", help="attention backend (default: the fastest that serves)"
    )


def add_picture(p: ArgumentParser) -> None:
    """Add --no-picture; the destination is `picture`."""
    p.add_argument(
        "--no-picture", dest="picture", action="store_false", help="do not draw the pattern map"
    )


def add_device(p: ArgumentParser) -> None:
    """Add --device with a torch device name; profiling.models.device resolves "auto"."""
    p.add_argument(
        "--device",
        metavar="DEVICE",
        default="auto",
        help="cpu, cuda, cuda:1, ... (default: the GPU where torch sees one, else cpu)",
    )


def add_dtype(
    p: ArgumentParser,
    help: str | None = None,
    *,
    several: bool = False,
    default: str | None = "auto",
) -> None:
    """Add --dtype of the model or tensors, also as bf16; with `several` it is a list.

    profiling.models.device resolves "auto" for the device.
    """
    keywords: dict[str, Any] = {"default": default}
    if several:
        keywords = {"nargs": "+", "default": [default]}
    keywords |= {"type": lambda text: DTYPES.get(text, text), "choices": tuple(DTYPES.values())}
    default_help = f"{', '.join(DTYPES.values())} (default {_DTYPE_DEFAULT})"
    p.add_argument("--dtype", metavar="DTYPE", help=help or default_help, **keywords)


def add_seed(
    p: ArgumentParser, default: int = 0, help: str = "of all that is drawn (default %(default)s)"
) -> None:
    """Add --seed, a whole number."""
    p.add_argument("--seed", metavar="N", type=natural, default=default, help=help)


def add_revision(p: ArgumentParser) -> None:
    """Add --revision, the model's revision on the hub."""
    p.add_argument("--revision", metavar="REV", help="revision of a hub model")


# Rarely needed options that many commands share.
ADVANCED = frozenset((add_backend, add_dtype, add_picture, add_revision, add_seed))


def json_file(text: str) -> Path:
    """Argument type of --json: a writable file, or STDOUT."""
    from artifacts.files import check_writable

    path = Path(text)
    if path != STDOUT:
        try:
            check_writable(text)
        except HeadwiseError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return path


def deliver(text: str, record: Mapping[str, Any], to: Path | None) -> None:
    """Print the text, or the record with --json; --json FILE writes the record as well."""
    if to != STDOUT:
        print(text)
    deliver_json(record, to)


def deliver_json(record: Mapping[str, Any], to: Path | None) -> None:
    """Write the record to the --json destination; do nothing without --json."""
    if to is None:
        return
    written = json.dumps(record, indent=1, default=str) + "\n"
    if to == STDOUT:
        sys.stdout.write(written)
    else:
        from artifacts.files import atomic_write

        atomic_write(to, written.encode())


def as_typed(verb: str, argv: Sequence[str] | None) -> str:
    """Return the command line for records: `headwise VERB ...`."""
    return f"headwise {verb} {shlex.join(sys.argv[1:] if argv is None else argv)}".rstrip()
