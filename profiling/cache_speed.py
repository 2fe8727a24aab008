"""Speed and bytes of decode under cache policies, beside a full cache: the model's own, and one by the same kernel.

python -m profiling.cache_speed --model smollm2 --policy h2o:heavy=0.1,recent=0.1 --context 4096 16384 --memory 1GiB

One sequence: time a token and bytes by context. With --memory also the largest batch whose cache fits into it, and what
it decodes in a second: caches that shrink serve more sequences at once. Contexts may go past the model's positions, for
only speed is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from artifacts import Full, HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.kv_cache import POLICY_KINDS
from artifacts.page_layout import aligned
from profiling.caches.policies import parse_policy, with_policy
from profiling.environment import environment
from profiling.memory_use.sizes import bytes_of
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import bar
from profiling.speed.baselines import COLUMNS, KERNEL, MODEL, cells, speedup
from profiling.speed.latency import interleaved
from runtime import Headwise, memory_report

# Tokens prefilled at a time: what a serving engine does, and no layer needs a whole prompt at once.
_CHUNK = 2048
# A cache of everything with the model's own attention, and with Headwise's kernel.
_SDPA, _FULL = "full, sdpa", "full"


@dataclass(frozen=True, kw_only=True)
class CacheSpeed:
    """What to measure; `memory` is in bytes, None leaves batches out."""

    model: str
    policies: tuple[str, ...]
    contexts: tuple[int, ...] = (4096,)
    memory: int | None = None
    steps: int = 16
    repeats: int = 5
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy at one context. Times are medians."""

    policy: str
    context: int
    token_seconds: float
    bytes: int
    batch: int | None
    batch_tokens_a_second: float | None


def run(config: CacheSpeed) -> tuple[list[Row], dict[str, Any]]:
    """Measure; rows by context, full caches first, and what is needed to repeat them.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    policies = {_SDPA: Full(), _FULL: Full(), **{text: parse_policy(text) for text in config.policies}}
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    methods: dict[str, Headwise] = {
        name: with_policy(loaded, None if name == _SDPA else policy) for name, policy in policies.items()
    }
    rows = [row for context in config.contexts for row in _at(config, loaded, methods, context)]
    record = {
        "rows": [asdict(row) for row in rows],
        "settings": asdict(config),
        "environment": environment(config.device),
    }
    return rows, record


@torch.no_grad()
def _at(config: CacheSpeed, loaded: LoadedModel, methods: dict[str, Headwise], context: int) -> list[Row]:
    caches = {name: _filled(config, loaded, headwise, context) for name, headwise in methods.items()}
    held = {name: memory_report(cache).device for name, cache in caches.items()}
    one = _times(config, loaded, methods, caches, 1)
    batches: dict[str, int] = {}
    many: dict[str, float] = {}
    if config.memory is not None:
        batches = {name: config.memory // nbytes for name, nbytes in held.items()}
        if small := next((name for name, batch in batches.items() if batch < 1), None):
            raise HeadwiseError(
                f"--memory {config.memory} is too small for one sequence of {context} tokens under {small}, "
                f"which takes {held[small]}"
            )
        for name, cache in caches.items():
            cache.batch_repeat_interleave(batches[name])
        many = _times(config, loaded, methods, caches, batches)
    return [
        Row(
            policy=name,
            context=context,
            token_seconds=one[name],
            bytes=held[name],
            batch=batches.get(name),
            batch_tokens_a_second=batches[name] / many[name] if many else None,
        )
        for name in methods
    ]


def _filled(config: CacheSpeed, loaded: LoadedModel, headwise: Headwise, context: int) -> Any:
    """The cache of one sequence of random tokens."""
    generator = torch.Generator().manual_seed(config.seed)
    vocabulary = loaded.model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (1, context), generator=generator).to(loaded.model.device)
    with headwise.apply(loaded.model, check_weights=False, strict=True) as handle:
        cache = handle.new_cache()
        for part in bar(ids.split(_CHUNK, dim=1), desc=f"prefill {context}"):
            loaded.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _times(
    config: CacheSpeed,
    loaded: LoadedModel,
    methods: dict[str, Headwise],
    caches: dict[str, Any],
    batches: int | dict[str, int],
) -> dict[str, float]:
    """Median seconds of a step, the methods in turn."""
    current: list[Any] = []

    def entering(name: str) -> Callable[[], AbstractContextManager[object]]:
        def enter() -> AbstractContextManager[object]:
            batch = batches if isinstance(batches, int) else batches[name]
            token = torch.zeros(batch, 1, dtype=torch.long, device=loaded.model.device)
            current[:] = [caches[name], token]
            return methods[name].apply(loaded.model, check_weights=False, strict=True)

        return enter

    def decode() -> None:
        for _ in range(config.steps):
            loaded.model(current[1], past_key_values=current[0], use_cache=True)

    seconds = interleaved(
        {name: entering(name) for name in methods}, decode, repeats=config.repeats, device=config.device
    )
    return {name: statistics.median(taken) / config.steps for name, taken in seconds.items()}


def table(rows: Sequence[Row]) -> str:
    """The rows as an aligned text table; ratios are to the full caches of the same context, bytes to the kernel's."""
    lines = [["policy", "context", "ms/token", *COLUMNS, "MiB", "of full", "batch", "tokens/s", *COLUMNS]]
    for row in rows:
        own, full = (next(r for r in rows if (r.context, r.policy) == (row.context, name)) for name in (_SDPA, _FULL))
        one = speedup([row.token_seconds], {MODEL: [own.token_seconds], KERNEL: [full.token_seconds]})
        rate = row.batch_tokens_a_second
        many = None
        if rate and own.batch_tokens_a_second and full.batch_tokens_a_second:
            # Seconds of a token of the whole batch.
            dense = {MODEL: [1 / own.batch_tokens_a_second], KERNEL: [1 / full.batch_tokens_a_second]}
            many = speedup([1 / rate], dense)
        lines.append(
            [
                row.policy,
                f"{row.context:,}",
                f"{1e3 * row.token_seconds:.2f}",
                *cells(one),
                f"{row.bytes / 2**20:.1f}",
                f"{row.bytes / full.bytes:.3f}",
                "-" if row.batch is None else str(row.batch),
                "-" if rate is None else f"{rate:.1f}",
                *cells(many),
            ]
        )
    return "\n".join(aligned(lines))


def parser() -> ArgumentParser:
    """The command line of python -m profiling.cache_speed."""
    p = ArgumentParser(prog="python -m profiling.cache_speed", description=__doc__)
    arguments.add_model(p)
    p.add_argument(
        "--policy",
        dest="policies",
        action="append",
        help="KIND or KIND:FIELD=VALUE,..., repeatable (default h2o); kinds: " + ", ".join(POLICY_KINDS),
    )
    p.add_argument(
        "--context", metavar="N", nargs="+", type=int, default=CacheSpeed.contexts, help="tokens in the cache"
    )
    p.renamed("--contexts", "--context")
    p.add_argument("--memory", help="also the largest batch whose cache fits into so many bytes, such as 1GiB")
    p.add_argument("--steps", type=int, default=CacheSpeed.steps, help="tokens of a timed round")
    p.add_argument("--repeats", type=int, default=CacheSpeed.repeats, help="timed rounds, in turn")
    arguments.add_seed(p, CacheSpeed.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_json(p)
    return p


def config_from(options: argparse.Namespace) -> CacheSpeed:
    """What a command line asks for.

    Raises:
        HeadwiseError: a value that cannot be.
    """
    for name in ("steps", "repeats"):
        if getattr(options, name) < 1:
            raise HeadwiseError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if (least := min(options.context)) < 1:
        raise HeadwiseError(f"--context must be at least 1, got {least}")
    policies = tuple(options.policies or ("h2o",))
    for text in policies:
        parse_policy(text)
    return CacheSpeed(
        model=options.model,
        policies=policies,
        contexts=tuple(options.context),
        memory=None if options.memory is None else bytes_of(options.memory, "--memory"),
        steps=options.steps,
        repeats=options.repeats,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    config = config_from(options)
    rows, record = run(config)
    record = {"command": arguments.as_typed("profiling.cache_speed", argv), **record}
    arguments.deliver(table(rows), record, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
