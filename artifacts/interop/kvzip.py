"""KVzip's head scores, from and to policies of KV heads.

A .pt file of one tensor (layers, KV heads): the largest attention that a head's keys get while the
context is repeated. Heads above a threshold keep all; the others keep nothing of the context, but
the system prompt before it and all that comes after it."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, shorten
from artifacts.interop.kv_heads import (
    SINKS,
    SLIDES,
    UNIT,
    WINDOW,
    Table,
    head_policies,
    import_heads,
    parted_scores,
    streaming,
)
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import Given
from artifacts.interop.source import MAX_BYTES, Source
from artifacts.schema.artifact import Artifact
from artifacts.schema.fields import MOST, MOST_HEADS
from artifacts.schema.kv_cache import Full, Streaming

if TYPE_CHECKING:
    import torch

    from artifacts.store.sidecar import Array

# The ratio of heads kept that KVzip advises.
_RATIO = 0.6
# Tokens of the context for which KVzip's cut is computed.
_CONTEXT = 2**17


def read(source: Source, given: Given) -> Import:
    """Read a tensor of head scores into an artifact that has a kv_cache section and no patterns.

    The share of heads that keep everything is 0.6 where nobody says otherwise, and cut as KVzip
    cuts it. The others keep sinks and a window.

    Raises:
        ArtifactError: the file is no such tensor, or does not fit the model.
    """
    table = _table(source.data)
    scores = list(chain.from_iterable(table))
    if given.threshold is not None:
        cut = given.threshold
    elif given.sparsity is not None:
        cut = _cut(scores, 1 - given.sparsity)
    else:
        cut = _cut(scores, _RATIO)
    keep = [[score > cut for score in row] for row in table]
    stream = streaming(given, sinks=SINKS, window=WINDOW)
    notes = Notes()
    notes.file(
        "chooses otherwise",
        "this file alone was read; KVzip takes each head's largest score of all its files",
    )
    if math.isfinite(cut):
        notes.file("same", f"KV heads above {cut:.6g} keep everything")
    kept = f"keeps {stream.sinks} sinks and the last {stream.window} tokens"
    return import_heads(
        source,
        given,
        format="kvzip",
        table=table,
        keep=keep,
        stream=stream,
        differs=("chooses otherwise", f"{kept}; there nothing of the context, and all after it"),
        notes=notes,
    )


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write the imported scores if a threshold still parts the heads, otherwise 1 and 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section.
    """
    policies = head_policies(artifact)
    notes = Notes()
    exact = 0
    for policy in chain.from_iterable(policies):
        if policy is None:
            notes.heads("not carried over", SLIDES)
        elif isinstance(policy, Full):
            exact += 1
        elif isinstance(policy, Streaming):
            notes.heads("keeps less", "nothing of a context is kept, here sinks and a window")
        else:
            notes.heads("computes more", f"{policy.kind} is written as full")
    notes.left_out(artifact, "kv_cache")
    heads = artifact.model.num_layers * artifact.model.num_kv_heads
    kept = sum(not isinstance(policy, Streaming) for policy in chain.from_iterable(policies))
    # Every ratio between kept / heads and (kept + 1) / heads cuts here.
    ratio = min((kept + 0.5) / heads, 1.0)
    notes.file("same", f"serve it with a ratio of {ratio:.6g}")
    table, _ = parted_scores(policies, arrays)
    return Export(files={out: _tensor_file(table)}, report=notes.report(heads, exact, UNIT))


def _cut(scores: Sequence[float], ratio: float) -> float:
    """Score that a KV head must exceed to keep everything, as KVzip's `_threshold` cuts.

    KVzip repeats a head's score for every token of the context and cuts that list, so a head counts
    as many times as the context has tokens. With some thousands of them the cut no longer depends
    on how many."""
    if ratio >= 1:
        return -math.inf
    descending = sorted(scores, reverse=True)
    kept_entries = int(len(descending) * _CONTEXT * ratio)
    return descending[max(kept_entries - 1, 0) // _CONTEXT]


def _table(data: bytes) -> Table:
    """The scores of a .pt file.

    Raises:
        ArtifactError: the tensor is of another shape, or holds other numbers than scores.
    """
    tensor = _tensor(data)
    if (
        tensor.ndim != 2
        or not all(1 <= size <= MOST for size in tensor.shape)
        or tensor.numel() > MOST_HEADS
    ):
        raise ArtifactError(
            f"must be of shape (layers, KV heads), got {shorten(tuple(tensor.shape))}"
        )
    table: Table = tensor.double().tolist()
    scores = list(chain.from_iterable(table))
    if not all(0 <= score <= 1 for score in scores):
        raise ArtifactError(f"must hold scores from 0 to 1, got {min(scores):g} to {max(scores):g}")
    return table


def _tensor(data: bytes) -> torch.Tensor:
    """The floating-point tensor of a .pt file.

    Raises:
        ArtifactError: the file is no .pt of one such tensor, or unpacks to more than is read of any
            file.
    """
    import torch

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"unpacks to {size} bytes")
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # torch.load names no kinds of errors for files that are none of its own
        raise ArtifactError(f"is no .pt file of one tensor: {shorten(str(error), 120)}") from None
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or not tensor.is_floating_point()
    ):
        raise ArtifactError("is no .pt file of one tensor of floating-point numbers")
    return tensor


def _tensor_file(table: Table) -> bytes:
    """A .pt file of the scores, in the smallest dtype that holds them exactly."""
    import torch

    scores = torch.tensor(table, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(scores.to(dtype).float(), scores):
            break
    stream = io.BytesIO()
    torch.save(scores.to(dtype), stream)
    return stream.getvalue()
