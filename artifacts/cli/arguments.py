"""Arguments that several commands share, each declared once.

A command adds those that it takes to its parser: `add_model(p)` is --model.
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
    """The artifact's YAML file, positional; nargs as argparse has it."""
    p.add_argument(dest, metavar="ARTIFACT", type=Path, nargs=nargs, help=help)


def add_model(
    p: ArgumentParser, help: str = MODEL, *, required: bool = True, default: str | None = None
) -> None:
    """--model; a default makes it optional."""
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
    """--length in tokens; `several` gives a list."""
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
    """--task with parameters, such as passkey@depth=0.5 or text:FILE.

    Args:
        several: repeatable, a list or None.
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
    """--out, where to write."""
    p.add_argument("--out", metavar=metavar, type=Path, required=required, help=help)


def add_json(p: ArgumentParser) -> None:
    """--json [FILE]: None, STDOUT or a writable file; one without .json needs `--json=FILE`."""
    p.add_argument("--json", metavar="FILE", nargs="?", type=json_file, const=STDOUT, help=JSON)


def add_fresh(p: ArgumentParser) -> None:
    """--fresh, of a command that goes on where it was killed."""
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")


def add_backend(p: ArgumentParser) -> None:
    """--backend of attention."""
    p.add_argument(
        "--backend", default="auto", help="attention backend (default: the fastest that serves)"
    )


def add_picture(p: ArgumentParser) -> None:
    """--no-picture; the destination is `picture`."""
    p.add_argument(
        "--no-picture", dest="picture", action="store_false", help="do not draw the pattern map"
    )


def add_device(p: ArgumentParser) -> None:
    """--device as torch names it; profiling.models.device decides what "auto" is."""
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
    """--dtype of the model or the tensors, also in short (bf16); `several` gives a list.

    "auto" is settled by profiling.models.device, which knows the device.
    """
    keywords: dict[str, Any] = {"default": default}
    if several:
        keywords = {"nargs": "+", "default": [default]}
    keywords |= {"type": lambda text: DTYPES.get(text, text), "choices": tuple(DTYPES.values())}
    known = f"{', '.join(DTYPES.values())} (default {_DTYPE_DEFAULT})"
    p.add_argument("--dtype", metavar="DTYPE", help=help or known, **keywords)


def add_seed(
    p: ArgumentParser, default: int = 0, help: str = "of all that is drawn (default %(default)s)"
) -> None:
    """--seed, a whole number."""
    p.add_argument("--seed", metavar="N", type=natural, default=default, help=help)


def add_revision(p: ArgumentParser) -> None:
    """--revision of a model on the hub."""
    p.add_argument("--revision", metavar="REV", help="revision of a hub model")


# What few need of what many commands have.
ADVANCED = frozenset((add_backend, add_dtype, add_picture, add_revision, add_seed))


def json_file(text: str) -> Path:
    """Argument type of --json: a file that can be written, or STDOUT."""
    from artifacts.files import check_writable

    path = Path(text)
    if path != STDOUT:
        try:
            check_writable(text)
        except HeadwiseError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return path


def deliver(text: str, record: Mapping[str, Any], to: Path | None) -> None:
    """Print the text, or with --json the record in its place; --json FILE writes the record too."""
    if to != STDOUT:
        print(text)
    deliver_json(record, to)


def deliver_json(record: Mapping[str, Any], to: Path | None) -> None:
    """Write the record where --json asks for it; nothing without it."""
    if to is None:
        return
    written = json.dumps(record, indent=1, default=str) + "\n"
    if to == STDOUT:
        sys.stdout.write(written)
    else:
        from artifacts.files import atomic_write

        atomic_write(to, written.encode())


def as_typed(verb: str, argv: Sequence[str] | None) -> str:
    """The command line of a command, for records: `headwise VERB ...`."""
    return f"headwise {verb} {shlex.join(sys.argv[1:] if argv is None else argv)}".rstrip()
