"""python -m profiling.turns: few new tokens on a long past, by a layer's patterns and by the better dense attention.

One layer's call as transformers makes it, index and Python included. Which way Headwise takes it finds out in the first
call of a length, see runtime.attention.turns; what is timed comes after that.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, natural, run_command
from kernels.patterns import LayerPlan
from profiling.bench import head_pair
from profiling.environment import environment
from profiling.models.loading import check_device
from profiling.speed.attention_speed import Size, inputs, patterns_for
from profiling.speed.latency import in_turn
from profiling.speed.ratios import Ratio, ratio_of_pairs
from runtime.attention.function import headwise_attention, register
from runtime.attention.masks import headwise_mask
from runtime.attention.state import Calls, Layer, Settings, forget, remember
from runtime.dense import dense_attention

DENSE = {"sdpa": "sdpa", "dense kernel": "kernel"}


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """Tokens of the pasts and of the turns, the layer's shape, and the share of the causal area that patterns keep."""

    past: tuple[int, ...] = (8192, 32_768)
    new: tuple[int, ...] = (16, 64, 200, 1000)
    heads: tuple[int, int] = (9, 3)
    head_dim: int = 64
    dtype: str = "bfloat16"
    device: str = "cpu"
    density: float = 0.1
    dense_tail: int = 64
    repeats: int = 7
    threads: int = 2


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn: median seconds of each way, how Headwise served it, and its time over the better dense's, in pairs."""

    past: int
    new: int
    seconds: dict[str, float]
    served: str
    against_better: Ratio


def run(config: TurnsConfig) -> list[Turn]:
    """Time every turn on every past.

    Raises:
        HeadwiseError: a size that is none, or a device that is not there.
    """
    check_device(config.device)
    for name in ("past", "new", "repeats", "threads"):
        value = getattr(config, name)
        if min(value if isinstance(value, tuple) else (value,)) < 1:
            raise HeadwiseError(f"--{name} must be at least 1, got {value}")
    torch.set_num_threads(config.threads)
    with torch.no_grad():
        return [_turn(config, past, new) for past, new in itertools.product(config.past, config.new)]


def _turn(config: TurnsConfig, past: int, new: int) -> Turn:
    heads, kv_heads = config.heads
    size = Size(
        length=past + new,
        head_dim=config.head_dim,
        heads=heads,
        kv_heads=kv_heads,
        dtype=config.dtype,
        device=config.device,
    )
    q, k, v = inputs(size)
    q = q[:, :, past:].contiguous()
    kinds = itertools.cycle(patterns_for(past, config.density)[:3])
    plan = LayerPlan([next(kinds) for _ in range(heads)], kv_heads, dense_tail=config.dense_tail)
    runs: dict[str, Callable[[], Any]] = {
        name: lambda by=by: dense_attention(q, k, v, by=by)  # type: ignore[misc]
        for name, by in DENSE.items()
    }
    with _layer(plan, q, k, v) as (call, layer):
        # What is faster is found out here.
        call()
        runs["headwise"] = call
        layer.settings.calls = Calls()
        seconds = in_turn(runs, repeats=config.repeats, device=config.device)
        served = ", ".join(layer.settings.calls.total())
    better = min(DENSE, key=lambda name: statistics.median(seconds[name]))
    return Turn(
        past=past,
        new=new,
        seconds={name: statistics.median(taken) for name, taken in seconds.items()},
        served=served,
        against_better=ratio_of_pairs(seconds["headwise"], seconds[better]),
    )


@contextmanager
def _layer(plan: LayerPlan, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Callable[[], Any], Layer]]:
    """A call of an attention layer with these patterns, as a model makes it that nothing else is in."""
    module, config = nn.Module(), PretrainedConfig()
    settings = Settings(dense_below=1024, dense="sdpa", strict=False, backend="auto")
    layer = Layer(settings, 0, plan)
    group = q.shape[1] // k.shape[1]
    module.num_key_value_groups, module.is_causal = group, True  # type: ignore[assignment]
    register()
    remember(config, {module: layer}, settings)
    try:
        q_len, k_len = q.shape[2], k.shape[2]
        given = {"batch_size": 1, "q_length": q_len, "kv_length": k_len, "q_offset": k_len - q_len, "config": config}
        mask = headwise_mask(**given, dtype=q.dtype, device=q.device, allow_is_causal_skip=True)
        yield lambda: headwise_attention(module, q, k, v, mask, scaling=q.shape[-1] ** -0.5), layer
    finally:
        forget(config, [module])


def report(config: TurnsConfig, turns: list[Turn]) -> str:
    """A table for people."""
    lines = [
        f"{'past':>7}{'new':>6}" + "".join(f"{name:>14}" for name in (*DENSE, "headwise")) + "  of the better dense"
    ]
    for turn in turns:
        times = "".join(f"{1000 * turn.seconds[name]:11.2f} ms" for name in (*DENSE, "headwise"))
        ratio = turn.against_better
        lines.append(
            f"{turn.past:7}{turn.new:6}{times}  {ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f}), {turn.served}"
        )
    return "\n".join(lines)


def parser() -> ArgumentParser:
    defaults = TurnsConfig()
    made = ArgumentParser(prog="python -m profiling.turns", description=__doc__)
    made.add_argument("--past", type=natural, nargs="+", metavar="N", default=defaults.past, help="tokens of the pasts")
    made.add_argument("--new", type=natural, nargs="+", metavar="N", default=defaults.new, help="tokens of the turns")
    made.add_argument("--heads", type=head_pair, default=defaults.heads, metavar="H/G", help="query and KV heads")
    made.add_argument("--head-dim", type=natural, default=defaults.head_dim, metavar="N", help="default: %(default)s")
    arguments.add_dtype(made, default=defaults.dtype)
    arguments.add_device(made, default=defaults.device)
    made.add_argument("--density", type=float, default=defaults.density, help="of the patterns; default: %(default)s")
    made.add_argument(
        "--dense-tail", type=natural, metavar="N", default=defaults.dense_tail, help="default: %(default)s"
    )
    made.add_argument(
        "--repeats", type=natural, metavar="N", default=defaults.repeats, help="rounds; default: %(default)s"
    )
    made.add_argument(
        "--threads", type=natural, metavar="N", default=defaults.threads, help="of the CPU; default: %(default)s"
    )
    arguments.add_json(made)
    return made


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json = options.pop("json")
    config = TurnsConfig(**options | {name: tuple(options[name]) for name in ("past", "new")})
    turns = run(config)
    record = {"command": arguments.as_typed("profiling.turns", argv), **asdict(config)}
    record |= {"environment": environment(config.device), "turns": [asdict(turn) for turn in turns]}
    arguments.deliver(report(config, turns), record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
