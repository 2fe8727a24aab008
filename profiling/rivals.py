"""python -m profiling.rivals: an artifact beside both dense attentions and OpenVINO GenAI, on the same prompts.

OpenVINO GenAI (pip install 'headwise[rivals]') serves the model densely and with XAttention, its sparse prefill. All
take turns; a prompt is served once by each, for the time to its first token and for its answer.

python -m profiling.rivals cfg.yaml --model smollm2 --length 8192 --json rivals.json
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from artifacts import HeadwiseError, arguments, load_pair
from artifacts.command_line import ArgumentParser, run_command
from artifacts.page_layout import aligned
from profiling.environment import environment
from profiling.models.loading import LoadedModel, load_model
from profiling.models.openvino import exported
from profiling.prompts.prompt import Prompt, make_prompts
from profiling.quality.answers import ends, is_right, new_tokens
from profiling.speed.baselines import COLUMNS, HEADWISE, KERNEL, LABELS, MODEL, Speedup, cells, dense, speedup
from runtime import load as load_headwise
from runtime.fingerprint import check
from runtime.layers import text_config

OPENVINO, XATTENTION = "openvino", "xattention"
_LABELS = {**LABELS, OPENVINO: "OpenVINO GenAI, dense", XATTENTION: "OpenVINO GenAI, XAttention"}
# What a speed-up is against the best of.
_DENSE = (MODEL, KERNEL, OPENVINO)


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """What to compare. repeats: prompts that are timed, after one that is not.

    threshold, block, stride, last: XAttention's share of the scores that is kept, its blocks in tokens, the stride of
        its estimate, and how many of a prompt's last tokens attend to everything.
    without: dense attentions that are not run, of those that a speed-up is against.
    """

    model: str
    config: Path
    length: int = 8192
    task: str = "passkey"
    repeats: int = 3
    threshold: float = 0.9
    block: int = 64
    stride: int = 8
    last: int = 64
    without: Sequence[str] = ()
    threads: int | None = None
    seed: int = 1000
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("length", "repeats", "block", "stride"):
            if (value := getattr(self, name)) < 1:
                raise HeadwiseError(f"--{name} must be at least 1, got {value}")
        if not 0 < self.threshold <= 1:
            raise HeadwiseError(f"--threshold must be above 0 and at most 1, got {self.threshold}")


@dataclass(frozen=True)
class Served:
    """One prompt by one method: seconds to the first token, and the greedy answer."""

    seconds: float
    answer: str


@dataclass(frozen=True)
class _Way:
    """How a method serves a prompt, and what is entered before it does."""

    serve: Callable[[Prompt], Served]
    enter: Callable[[], AbstractContextManager[object]] = nullcontext


def run(config: Rivals) -> dict[str, Any]:
    """Measure.

    Returns:
        What the JSON holds.

    Raises:
        HeadwiseError: anything that the user has to put right.
        ModuleNotFoundError: OpenVINO GenAI is not installed.
    """
    import openvino_genai

    artifact, _ = load_pair(config.config)
    if config.length < artifact.prefill.dense_below:
        raise HeadwiseError(
            f"--length {config.length} is below the artifact's dense_below of {artifact.prefill.dense_below}: "
            "Headwise would be dense; ask for a longer prompt"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(config.model, dtype=config.dtype)
    check(artifact.model, loaded.model)
    how = {"length": config.length, "samples": config.repeats + 1, "seed": config.seed}
    prompts = make_prompts(config.task, loaded.tokenizer, **how)  # type: ignore[arg-type]
    if any(prompt.answer is None or prompt.turn for prompt in prompts):
        raise HeadwiseError(f"--task {config.task} has no answer at the end of its prompts: take one that retrieves")
    weights = artifact.model.weights_sha256
    if weights is None:
        raise HeadwiseError(f"{config.config} does not say which weights it is for: search it again")
    found = _in_turn(_ways(config, loaded, exported(config.model, weights=weights)), prompts)
    seconds = {name: [one.seconds for one in served[1:]] for name, served in found.items()}
    return {
        "settings": {**asdict(config), "config": config.config.name},
        "artifact": {
            "content_sha256": artifact.content_sha256,
            "command": artifact.search.command if artifact.search else None,
        },
        "environment": environment() | {"openvino": version("openvino"), "openvino_genai": openvino_genai.__version__},
        "rows": [
            {
                "method": name,
                "seconds": statistics.median(seconds[name]),
                "rounds": seconds[name],
                "speedups": dict(_against_dense(seconds, name).over),
                "right": sum(is_right(prompt, one.answer) for prompt, one in zip(prompts, served, strict=True)),
                "answers": [one.answer for one in served],
            }
            for name, served in found.items()
        ],
        "over_xattention": speedup(seconds[HEADWISE], {XATTENTION: seconds[XATTENTION]}).value,
        "expected": [prompt.answer for prompt in prompts],
    }


def _against_dense(seconds: dict[str, list[float]], name: str) -> Speedup:
    return speedup(seconds[name], {each: seconds[each] for each in _DENSE if each in seconds})


def _ways(config: Rivals, loaded: LoadedModel, folder: Path) -> dict[str, _Way]:
    headwise = load_headwise(config.config)

    def serve(prompt: Prompt) -> Served:
        return _by_model(loaded, prompt)

    ways: dict[str, Callable[[], _Way]] = {
        MODEL: lambda: _Way(serve, lambda: dense(loaded.model, MODEL)),
        KERNEL: lambda: _Way(serve, lambda: dense(loaded.model, KERNEL)),
        HEADWISE: lambda: _Way(serve, lambda: headwise.apply(loaded.model, check_weights=False, strict=True)),
        OPENVINO: lambda: _Way(_pipeline(config, loaded, folder, sparse=False)),
        XATTENTION: lambda: _Way(_pipeline(config, loaded, folder, sparse=True)),
    }
    return {name: way() for name, way in ways.items() if name not in config.without}


def _in_turn(ways: dict[str, _Way], prompts: Sequence[Prompt]) -> dict[str, list[Served]]:
    """Every prompt by every method, prompt by prompt."""
    found: dict[str, list[Served]] = {name: [] for name in ways}
    for prompt in tqdm(prompts, desc="rounds", disable=None, leave=False):
        for name, way in ways.items():
            with way.enter():
                found[name].append(way.serve(prompt))
    return found


@torch.no_grad()
def _by_model(loaded: LoadedModel, prompt: Prompt) -> Served:
    from transformers import DynamicCache

    model = loaded.model
    cache = DynamicCache(config=text_config(model))
    ids = torch.tensor([prompt.input_ids])
    tokens: list[int] = []
    start = time.perf_counter()
    taken = 0.0
    while len(tokens) < new_tokens(loaded.tokenizer, prompt):
        token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].argmax()
        tokens.append(int(token))
        taken = taken or time.perf_counter() - start
        if tokens[-1] in ends(model, loaded.tokenizer):
            break
        ids = token[None, None]
    return Served(taken, _text(loaded.tokenizer, tokens))


def _pipeline(config: Rivals, loaded: LoadedModel, folder: Path, *, sparse: bool) -> Callable[[Prompt], Served]:
    """OpenVINO GenAI's pipeline, a prompt prefilled in one batch, with as many threads as torch has."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    of = text_config(loaded.model)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = config.length + 256
    scheduler.enable_prefix_caching = False
    dim = getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
    # In GiB; keys and values of at most 4 bytes, and room for as much again.
    held = 2 * 4 * of.num_hidden_layers * of.num_key_value_heads * dim * (config.length + 256)
    scheduler.cache_size = math.ceil(2 * held / 2**30)
    if sparse:
        scheduler.use_sparse_attention = True
        scheduler.sparse_attention_config = genai.SparseAttentionConfig(
            mode=genai.SparseAttentionMode.XATTENTION,
            num_last_dense_tokens_in_prefill=config.last,
            xattention_threshold=config.threshold,
            xattention_block_size=config.block,
            xattention_stride=config.stride,
        )
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    if config.dtype == "float32":
        options |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    made = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", options, {})

    def serve(prompt: Prompt) -> Served:
        generation = genai.GenerationConfig(max_new_tokens=new_tokens(loaded.tokenizer, prompt))
        generation.do_sample = False
        generation.stop_token_ids = ends(loaded.model, loaded.tokenizer)
        ids = openvino.Tensor(np.array([prompt.input_ids], dtype=np.int64))
        (result,) = made.generate([ids], [generation])
        return Served(
            result.perf_metrics.get_ttft().mean / 1e3, _text(loaded.tokenizer, list(result.m_generation_ids[0]))
        )

    return serve


def _text(tokenizer: Any, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


def table(record: dict[str, Any]) -> str:
    """The rows as aligned text, and what Headwise is beside the best of the rest."""
    total = len(record["expected"])
    lines = [["", "prefill s", *COLUMNS, "answers right"]]
    for row in record["rows"]:
        found = cells(Speedup(over=row["speedups"]) if row["speedups"] else None)
        lines.append([_LABELS[row["method"]], f"{row['seconds']:.3f}", *found, f"{row['right']} of {total}"])
    return "\n".join([*aligned(lines), f"Headwise is {record['over_xattention']:.2f} times as fast as XAttention"])


def parser() -> ArgumentParser:
    """The command line of python -m profiling.rivals."""
    p = ArgumentParser(prog="python -m profiling.rivals", description=__doc__)
    arguments.add_model(p, f"{arguments.MODEL}; none whose layers slide")
    arguments.add_artifact(p)
    arguments.add_length(p, "tokens of a prompt (default 8192)", default=Rivals.length)
    arguments.add_task(p, "what is asked (default passkey)", several=False, default=Rivals.task)
    p.add_argument(
        "--repeats", type=int, default=Rivals.repeats, help="timed prompts, after one that is not (default 3)"
    )
    p.add_argument("--threshold", type=float, default=Rivals.threshold, help="XAttention's (default 0.9)")
    p.add_argument("--block", type=int, default=Rivals.block, help="XAttention's, in tokens (default 64)")
    p.add_argument("--stride", type=int, default=Rivals.stride, help="XAttention's (default 8)")
    p.add_argument("--last", type=int, default=Rivals.last, help="last tokens that XAttention serves densely (64)")
    p.add_argument(
        "--without", nargs="+", choices=_DENSE, default=(), metavar="DENSE", help=f"not run: {', '.join(_DENSE)}"
    )
    p.add_argument("--threads", type=int, help="of all methods (default: torch's)")
    arguments.add_seed(p, Rivals.seed)
    arguments.add_dtype(p, "(default bfloat16, where OpenVINO keeps its own defaults)")
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    to_json = options.pop("json")
    found = run(Rivals(**options))
    record = {"command": arguments.as_typed("profiling.rivals", argv), **found}
    arguments.deliver(table(record), record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
