"""Files of text: their ids, and the cells of a text that prompts are made of."""

from __future__ import annotations

from pathlib import Path

from artifacts import HeadwiseError
from artifacts.errors import reason
from profiling.prompts.kind import Request, Span
from profiling.prompts.tokens import Encoder, Ids


def cells(request: Request, size: int) -> list[Span]:
    """Cut a text of `size` tokens into the cells of its prompts, in random order.

    A cell holds the text of any prompt of the request's length. Only the order of the cells depends
    on task and seed: prompts of other tasks and seeds are in the same cell or share no text. What
    is left over is at both ends of the text. A text that is shorter than a cell is one.
    """
    width = max(1, request.room())
    if size < width:
        return [(0, size)]
    starts = range(size % width // 2, size - width + 1, width)
    return [(start, start + width) for start in request.rng().sample(starts, len(starts))]


def read_ids(encode: Encoder, file: Path) -> Ids:
    """The ids of a whole text file."""
    text = read_text(file)
    ids = encode(text)
    if not text.strip() or not ids:
        raise HeadwiseError(f"{file.name} is empty")
    return ids


def read_text(file: Path) -> str:
    """A file of UTF-8 text; HeadwiseError where it is none."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HeadwiseError(
            f"{file.name} is not UTF-8 text: byte {error.start} does not belong there"
        ) from error
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"cannot read {file.name}: {reason(error)}") from error
