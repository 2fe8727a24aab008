"""Sparse attention on the GPU in Triton: checks a call, prepares and launches it.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim, N
key tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.attention import triton_launch
from kernels.attention.triton_launch import (
    KernelConfig,
    TileConfig,
    architecture,
    build_options,
    combine,
    dtype_unsupported,
    scratch,
    select_config,
    serves,
    split,
    split_values,
    unavailable,
)
from kernels.call import AttentionCall, Operands, derivative_wanted
from kernels.copies import on_device, with_rows
from kernels.index import TILE, SparseIndex, num_tiles
from kernels.ragged import Ragged
from kernels.registry import build_failure
from kernels.triton_calls import KernelCall, or_placeholder, run_calls, softmax_factors

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_DIM = 512


def supports(call: Operands) -> str | None:
    """The reason why this backend cannot serve the call; None where it can.

    Looks for triton only if the tensors are on a GPU.
    """
    q = call.q
    v = call.v
    if reason := unavailable(q.device):
        return reason
    if q.dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {q.dtype}"
    if (widest := max(q.shape[-1], v.shape[-1])) > _MAX_DIM:
        return f"it serves head dims up to {_MAX_DIM}, not {widest}"
    if reason := dtype_unsupported(call.k):
        return reason
    if reason := derivative_wanted(call) or build_failure(*_build(q, v)):
        return reason
    if not serves(target := architecture(q.device), dim=widest, itemsize=q.element_size()):
        return (
            f"{str(q.dtype).removeprefix('torch.')} with head dim {widest} "
            f"does not fit the memory of {target}"
        )
    return None


def run(
    call: AttentionCall, *, config: TileConfig | None = None, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call; see `prepare`."""
    calls = prepare(call, config=config, splits=splits)
    run_calls(calls, call.q.device, *_build(call.q, call.v))
    return calls[-1].arguments["out"], calls[-1].arguments["lse"]


def _build(q: Tensor, v: Tensor) -> tuple[object, ...]:
    """Key under which a failed build is remembered."""
    return "attention", str(q.device), q.dtype, v.dtype, q.shape[-1], v.shape[-1]


def prepare(
    call: AttentionCall, *, config: TileConfig | None = None, splits: int | None = None
) -> list[KernelCall]:
    """The launches of a call: an index's tables, attention, and the merge of parts, if any.

    `config` replaces the table's build, `splits` is the number of parts that keys are cut into.
    """
    index = call.index
    logits = call.logits
    block_table = call.block_table
    sinks = logits.wide_sinks
    skipped = call.skipped
    q, k, v = map(with_rows, (call.q, call.k, call.v))
    num_heads, q_len, dim, v_dim = *q.shape[1:], v.shape[-1]
    columns = index.columns
    ragged = index.ragged
    skip = index.skip
    # A window that holds all keys costs a comparison for each of them.
    window = index.window
    if window is not None and window >= index.k_len:
        window = None
    if skip is not None and skipped is None:
        skipped = torch.empty(skip.shape, dtype=torch.int32, device=q.device)

    target = architecture(q.device)
    if splits is None:
        few = triton_launch.underfills(index.batch * num_heads * index.num_rows, q.device)
    else:
        few = splits > 1

    def build(has_tiles: bool, has_columns: bool) -> TileConfig:
        if config is not None:
            return config
        # Skipping and lists of tiles need one program per query tile; and with few queries half of
        # a program of two would often be empty.
        alone = has_tiles or skip is not None or few
        selected = select_config(
            target, dim=max(dim, v_dim), itemsize=q.element_size(), has_tiles=alone
        )
        # Look-ups for each key take the registers of half a step, and so do a tail and padded
        # values.
        crowded = (
            sum(split_values(v_dim)) > v_dim
            or window is not None
            or block_table is not None
            or skip is not None
            or index.dense_tail > 0
        )
        limit = 128
        if has_tiles and has_columns:
            limit = 32
        elif crowded:
            limit = TILE
        return replace(selected, keys=min(selected.keys, limit))

    # Heads with lists of tiles get a separate launch; the others are served two query tiles a
    # program.
    widths = index.widths()
    parts = [
        [head for head in range(num_heads) if bool(widths[head][1]) is listed]
        for listed in (False, True)
    ]
    if config is not None or skip is not None or not all(parts):
        parts = [list(range(num_heads))]
    has = [[max(widths[head][sort] for head in part) for sort in range(3)] for part in parts]
    configs = [build(has_tiles > 0, has_columns > 0) for _, has_tiles, has_columns in has]
    out, lse = _results(q, v_dim, ragged, call.out)
    rows = max(each.rows for each in configs)
    alone = (part for part, each in zip(parts, configs, strict=True) if each.rows < rows)
    first = tables(index, rows, window, alone=next(alone, []))
    table = first.arguments["tables"]
    # Where both layouts keep (batch or page, head, row).
    order = (0, 1, 2)
    page = 0
    pages_width = 0
    if block_table is not None:
        order = (0, 2, 1)
        page = k.shape[1]
        pages_width = block_table.shape[-1]
    num_kv_heads = k.shape[order[1]]
    group = num_heads // num_kv_heads
    if skip is not None:
        # Skipping depends on anchors that lie in one part.
        splits = 1
    elif splits is None:
        splits = max(
            _splits(index, part, each, sizes, q, (k, v))
            for part, each, sizes in zip(parts, configs, has, strict=True)
        )
    partial = {"tops": lse, "totals": lse, "partial": lse}
    holes = ragged is not None and not ragged.covers(q.shape[0], q_len)
    if splits > 1:
        partial = scratch(q, num_kv_heads, v_dim, splits, holes=holes)
    offsets = index.offsets
    if index.tiles.numel():
        offsets = offsets.contiguous()
    places = table
    if ragged is not None:
        places = ragged.table(q.device)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "tables": table,
        "tiles": index.tiles.contiguous(),
        "offsets": offsets,
        "columns": columns.contiguous(),
        "dense_tail": index.dense_tail,
        "pages": or_placeholder(block_table, table),
        "places": places,
        "sinks": or_placeholder(sinks, lse),
        "skip": or_placeholder(skip, lse),
        "skipped": or_placeholder(skipped, table),
        **partial, **softmax_factors(logits, dim),
    }  # fmt: skip
    for name, tensor, axes in (
        ("q", q, (0, 1, 2)),
        ("k", k, order),
        ("v", v, order),
        ("out", out, (0, 1, 2)),
    ):
        arguments |= {
            f"{name}_{axis}": tensor.stride(i)
            for axis, i in zip(("batch", "head", "row"), axes, strict=True)
        }
    arguments |= {
        "num_heads": num_heads, "num_kv_heads": num_kv_heads, "group": group, "splits": splits,
        "q_len": q_len,
        "k_len": index.k_len, "first_row": index.first_row, "num_rows": index.num_rows,
        "window": window or 0,
        "walk_width": first.arguments["walk_width"], "table_width": first.arguments["n"] + 1,
        "table_size": table.shape[-1],
        "columns_width": columns.shape[-1],
        "pages_width": pages_width,
        "search_steps": min(max(width for _, width, _ in widths),
        num_tiles(index.k_len)).bit_length(),
    }  # fmt: skip
    calls = [first]
    for part, (diagonals, listed, columned), each in zip(parts, has, configs, strict=True):
        # A product of fp32 without the matrix units holds whole operands in registers.
        widest = 256
        if q.dtype == torch.float32 and each.precision == "ieee":
            widest = 128
        subset = len(part) < num_heads
        heads = table
        if subset:
            heads = on_device(tuple(part), q.device, torch.int32)
        chunks = -(-len(part) // group)
        per_chunk = group * -(-index.num_rows // each.rows) * splits
        d0, d1 = split(dim, widest)
        e0, e1 = split_values(v_dim, widest)
        compiled = KernelConfig(
            d=dim, d0=d0, d1=d1, e=v_dim, e0=e0, e1=e1,
            rows=each.rows, keys=each.keys, stages=each.stages, precision=each.precision,
            page=page,
            walk=diagonals > 1, tiles=listed > 0, columns=columned > 0, tail=index.dense_tail > 0,
            window=window is not None, ragged=ragged is not None,
            softcap=logits.softcap is not None, sinks=sinks is not None,
            skip=skip is not None, subset=subset, split=splits > 1,
        )  # fmt: skip
        more = {
            "heads": heads,
            "head_count": len(part), "chunks": chunks, "per_chunk": per_chunk,
        }  # fmt: skip
        programs = index.batch * chunks * per_chunk
        options = build_options(each)
        attention = _call(
            "triton_kernel",
            "sparse_attention_kernel",
            programs,
            arguments | more,
            {"H": compiled},
            options,
        )
        calls.append(replace(attention, plain=compiled.plain and config is None))
    if splits > 1:
        calls.append(
            combine(arguments, out, lse, sinks, rows=group * q_len, splits=splits, holes=holes)
        )
    return calls


def _splits(
    index: SparseIndex,
    heads: Sequence[int],
    config: TileConfig,
    sizes: Sequence[int],
    q: Tensor,
    kv: Sequence[Tensor],
) -> int:
    """Parts into which a launch cuts the keys of a program, by the most that it may have."""
    diagonals, listed, columned = sizes
    if index.dense_tail:
        keys = index.k_len
    else:
        keys = min(index.k_len, (diagonals + listed) * TILE + columned)
    programs = index.batch * len(heads) * -(-index.num_rows // config.rows)
    k, v = kv
    query_bytes = sum(split(q.shape[-1])) * q.element_size()
    key_bytes = sum(split(k.shape[-1])) * k.element_size()
    key_bytes += sum(split_values(v.shape[-1])) * v.element_size()
    at_once = triton_launch.concurrent_programs(config, key_bytes, query_bytes, q.device)
    return triton_launch.count(programs, keys // 128, at_once)


def _results(
    q: Tensor, v_dim: int, ragged: Ragged | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Memory for out and lse; rows of q that are in no sequence are 0 and -inf already."""
    batch, num_heads, q_len, _ = q.shape
    if ragged is None or ragged.covers(batch, q_len):
        if out is None:
            out = q.new_empty(batch, q_len, num_heads, v_dim).transpose(1, 2)
        return out, torch.empty(batch, num_heads, q_len, dtype=torch.float32, device=q.device)
    if out is None:
        out = q.new_zeros(batch, q_len, num_heads, v_dim).transpose(1, 2)
    else:
        for row, rest in _between(ragged, batch, q_len):
            out[row, :, rest].zero_()
    return out, torch.full(
        (batch, num_heads, q_len), float("-inf"), device=q.device, dtype=torch.float32
    )


def _between(ragged: Ragged, batch: int, q_len: int) -> Iterator[tuple[int, slice]]:
    """The batch element and the range of each run of query rows that belongs to no sequence."""
    for row in range(batch):
        places = zip(ragged.rows, ragged.q_starts, ragged.q_lens, strict=True)
        end = 0
        for start, length in sorted((start, length) for at, start, length in places if at == row):
            if start > end:
                yield row, slice(end, start)
            end = start + length
        if end < q_len:
            yield row, slice(end, q_len)


def tables(
    index: SparseIndex, rows: int, window: int | None, *, alone: Sequence[int] = ()
) -> KernelCall:
    """The launch that makes an index's tables for programs of `rows` query tiles.

    Nothing is read on the host.

    Args:
        index: the index to make tables of.
        rows: query tiles that one program serves, 1 or 2.
        window: a query sees itself and the window - 1 keys before it; None for all of them.
        alone: of `rows` = 2, the heads whose programs serve one query tile all the same.
    """
    device = index.diagonals.device
    (batch, num_heads, width) = index.diagonals.shape
    n = num_tiles(index.k_len)
    columns_width = index.columns.shape[-1]
    walk_width = min(n, 2 * width)
    table = torch.empty(
        batch, num_heads, 4 * walk_width + 7 * (n + 1), dtype=torch.int32, device=device
    )
    flags = table
    if alone:
        marks = tuple(int(head in alone) for head in range(num_heads))
        flags = on_device(marks, device, torch.int32)
    reach = n
    whole = n + 2
    if window is not None:
        reach = index.window_tiles
        whole = window // TILE
    arguments = {
        "diagonals": index.diagonals.contiguous(), "columns": index.columns.contiguous(),
        "tables": table,
        "alone": flags, "heads": num_heads,
        "width": width, "columns_width": columns_width, "walk_width": walk_width, "n": n,
        "reach": reach, "window": whole,
        "steps": width.bit_length(), "column_steps": columns_width.bit_length(),
    }  # fmt: skip
    chunk = min(1024, max(128, 1 << n.bit_length()))
    constants = {"ROWS": rows, "ALONE": bool(alone), "CHUNK": chunk}
    options = {"num_warps": chunk // 128}
    return _call(
        "triton_small_kernels",
        "tables_kernel",
        batch * num_heads,
        arguments,
        constants,
        options,
    )


def _call(
    module: str, kernel: str, programs: int, arguments: Any, constants: Any, options: Any
) -> KernelCall:
    return KernelCall(
        module=f"{__package__}.{module}",
        kernel=kernel,
        grid=(programs,),
        arguments=arguments,
        constants=constants,
        options=options,
    )
