"""MInference's list of head patterns, and the same list as vLLM and SGLang read it.

A JSON list of layers, each a mapping from a query head's number to [name, a, b, score]:

* vertical_and_slash: a columns and b diagonals, chosen by the last 64 queries.
* stream_llm: the first a tokens and the last b.
* block_sparse: 100 blocks of 64 keys a row, whatever a and b say.
* flex_vertical_and_slash: a and b are [share, most], as FlexPrefill takes columns and diagonals.

A head or a layer that is left out gets vertical_and_slash 1000, 6096. The score is the search's own and nothing reads
it: a recall, or how many of an output's elements were off. vLLM and SGLang, which look for the file beside a model as
sparse_attention_config.json, know vertical_and_slash alone, read 30 columns as 130, and serve only prompts above a
threshold so, which stands in the model's config.json under dual_chunk_attention_config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from artifacts.errors import ArtifactError, one_line, shorten
from artifacts.fields import MOST
from artifacts.interop.files import parse_json
from artifacts.patterns import AnyPattern, AShape, BlockSparse, VerticalSlash

NAMES = ("vertical_and_slash", "stream_llm", "block_sparse", "flex_vertical_and_slash")
BLOCKS = 100
_LARGEST = 2**31 - 1
# vLLM and SGLang add 100 columns to these.
FEW_COLUMNS, MORE_COLUMNS = 30, 130


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a file says of a head. shares: those of a flex_vertical_and_slash. score: None where it is null."""

    name: str
    sizes: tuple[int, int]
    shares: tuple[float, float] | None = None
    score: float | None = None

    def as_json(self, *, whole: bool = False) -> list[Any]:
        """As the file has it; the score as a whole number if asked for."""
        sizes: list[Any] = list(self.sizes)
        if self.shares is not None:
            sizes = [[share, size] for share, size in zip(self.shares, self.sizes, strict=True)]
        score = int(self.score) if whole and self.score is not None else self.score
        return [self.name, *sizes, score]


LEFT_OUT = Entry(name="vertical_and_slash", sizes=(1000, 6096))


def to_pattern(entry: Entry, format: str) -> AnyPattern:
    """The pattern that the tool of this format makes of an entry."""
    a, b = entry.sizes
    match entry.name:
        case "vertical_and_slash" if format == "sparse_attention_config" and a == FEW_COLUMNS:
            return VerticalSlash(vertical=MORE_COLUMNS, slash=b)
        case "vertical_and_slash":
            return VerticalSlash(vertical=a, slash=b)
        case "flex_vertical_and_slash":
            return VerticalSlash(vertical=a, slash=b, coverage=max(entry.shares or (1.0,)))
        case "stream_llm":
            return AShape(sink=a, window=b)
        case _:
            return BlockSparse(blocks=BLOCKS)


def read(path: Path, data: bytes, format: str) -> list[dict[int, Entry]]:
    """The entries of each layer by head.

    Raises:
        ArtifactError: the file is no such list; the line has the layer, the head, the value and what would be right.
    """
    layers = parse_json(path, data)
    shown = one_line(str(path))
    if not isinstance(layers, list) or not layers:
        raise ArtifactError(f"{shown}: must be a list with a mapping for each layer, got {shorten(layers)}")
    if len(layers) > MOST:
        raise ArtifactError(f"{shown}: has {len(layers)} layers, the most that make sense are {MOST}")
    return [dict(_layer(layer, row, format, shown)) for layer, row in enumerate(layers)]


def _layer(layer: int, row: Any, format: str, shown: str) -> Iterator[tuple[int, Entry]]:
    if not isinstance(row, dict):
        raise ArtifactError(f"{shown}: layer {layer}: must be a mapping from heads to patterns, got {shorten(row)}")
    for key, entry in row.items():
        if not (key.isascii() and key.isdigit() and len(key) < 6 and str(int(key)) == key and int(key) < MOST):
            raise ArtifactError(f"{shown}: layer {layer}: a head must be a number from 0 on, got {shorten(key)}")
        try:
            yield int(key), _entry(entry, format)
        except ArtifactError as error:
            raise ArtifactError(f"{shown}: layer {layer}, head {key}: {error}") from None


def _entry(entry: Any, format: str) -> Entry:
    if not isinstance(entry, list) or len(entry) != 4:
        raise ArtifactError(f"must be [name, a, b, score], got {shorten(entry)}")
    name, a, b, score = entry
    known = NAMES if format == "minference" else NAMES[:1]
    if name not in known:
        where = "" if format == "minference" else ": vLLM and SGLang read no other; is it MInference's own file?"
        raise ArtifactError(f"must be one of {', '.join(known)}, got {shorten(name)}{where}")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float) or not _finite(score)):
        raise ArtifactError(f"the score must be a number or null, got {shorten(score)}")
    score = None if score is None else float(score)
    if name != "flex_vertical_and_slash":
        return Entry(name=name, sizes=(_size(a), _size(b)), score=score)
    pairs = [size for size in (a, b) if isinstance(size, list) and len(size) == 2]
    if len(pairs) != 2:
        raise ArtifactError(f"must be [{name}, [share, most], [share, most], score], got {shorten(entry)}")
    shares = tuple(float(share) for share, _ in pairs if isinstance(share, int | float) and not isinstance(share, bool))
    if len(shares) != 2 or not all(0 < share <= 1 for share in shares):
        raise ArtifactError(f"a share must be above 0 and at most 1, got {shorten([share for share, _ in pairs])}")
    (_, most_columns), (_, most_diagonals) = pairs
    sizes = (_size(most_columns), _size(most_diagonals))
    return Entry(name=name, sizes=sizes, shares=(shares[0], shares[1]), score=score)


def _finite(score: int | float) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:
        return False


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise ArtifactError(f"a size must be a whole number from 1 on, got {shorten(value)}")
    return value


def scores_of(entries: Sequence[Entry]) -> Literal["recall", "other"] | None:
    """What the scores are: recalls where all are shares, others where some are above 1, None where they say nothing."""
    scores = [entry.score for entry in entries if entry.score is not None]
    if not any(scores):
        return None
    # float32 means of shares end up a rounding error above 1.
    return "recall" if all(0 <= score <= 1.0001 for score in scores) else "other"
