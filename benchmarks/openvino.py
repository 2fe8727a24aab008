"""An artifact, both dense attentions and OpenVINO GenAI, on the same prompts.

    pip install 'openvino-genai>=2026.4'
    python benchmarks/openvino.py cfg.yaml --model smollm2 --length 8192

OpenVINO GenAI serves the model densely and with XAttention, its sparse prefill. All are
interleaved; a prompt is served once by each, for the time to its first token and for its answer.
openvino_export.py makes the graph that it serves.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from openvino_export import exported
from tqdm import tqdm

from artifacts import HeadwiseError, load_pair
from artifacts.cli.command import run_command
from artifacts.page.layout import aligned
from profiling.environment import environment
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import Prompt, make_prompts
from profiling.quality.answers import ends, is_right, new_tokens
from profiling.speed.baselines import (
    COLUMNS,
    HEADWISE,
    KERNEL,
    LABELS,
    MODEL,
    Speedup,
    cells,
    dense,
    speedup,
)
from runtime import load as load_headwise
from runtime.fingerprint import check
from runtime.layers import text_config

OPENVINO = "openvino"
XATTENTION = "xattention"
_LABELS = {**LABELS, OPENVINO: "OpenVINO GenAI, dense", XATTENTION: "OpenVINO GenAI, XAttention"}
# Dense baselines: a speed-up is over the fastest.
_DENSE = (MODEL, KERNEL, OPENVINO)


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("config", type=Path, metavar="ARTIFACT")
    p.add_argument("--model", required=True, help="none with sliding-window layers")
    p.add_argument("--length", type=int, default=8192, help="tokens of a prompt (default 8192)")
    p.add_argument("--task", default="passkey", help="what is asked (default passkey)")
    p.add_argument(
        "--repeats", type=int, default=3, help="timed prompts, after one that is not (default 3)"
    )
    p.add_argument(
        "--threshold",
        type=float,
        default=0.9,
        help="XAttention's: fraction of the scores kept (default 0.9)",
    )
    p.add_argument("--block", type=int, default=64, help="XAttention's, in tokens (default 64)")
    p.add_argument(
        "--stride", type=int, default=8, help="XAttention's, of its estimate (default 8)"
    )
    p.add_argument(
        "--last",
        type=int,
        default=64,
        help="last tokens that XAttention serves densely (default 64)",
    )
    p.add_argument(
        "--without", nargs="+", choices=_DENSE, default=(), metavar="DENSE", help="not run"
    )
    p.add_argument("--threads", type=int, help="of all methods (default: torch's)")
    p.add_argument("--seed", type=int, default=1000)
    p.add_argument(
        "--dtype",
        default="bfloat16",
        help="(default bfloat16, where OpenVINO keeps its own defaults)",
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    return p


@dataclass(frozen=True)
class Served:
    """One prompt by one method: seconds to the first token, and the greedy answer."""

    seconds: float
    answer: str


@dataclass(frozen=True)
class _Method:
    """Serving of a prompt by one method, and the context it is served in."""

    serve: Callable[[Prompt], Served]
    enter: Callable[[], AbstractContextManager[object]] = nullcontext


def run(config: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the figures with the settings that they depend on.

    Raises:
        HeadwiseError: a mistake of the user.
    """
    import openvino_genai

    artifact, _ = load_pair(config.config)
    if config.length < artifact.prefill.dense_below:
        raise HeadwiseError(
            f"--length {config.length} is below the artifact's dense_below of "
            f"{artifact.prefill.dense_below}: "
            "Headwise would be dense; ask for a longer prompt"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    loaded = load_model(config.model, dtype=config.dtype)
    check(artifact.model, loaded.model)
    prompts = make_prompts(
        config.task,
        loaded.tokenizer,
        length=config.length,
        samples=config.repeats + 1,
        seed=config.seed,
    )
    if any(prompt.answer is None or prompt.turn for prompt in prompts):
        raise HeadwiseError(
            f"--task {config.task} has no answer at the end of its prompts: take one that retrieves"
        )
    weights = artifact.model.weights_sha256
    if weights is None:
        raise HeadwiseError(
            f"{config.config} does not say which weights it is for: search it again"
        )
    methods = _methods(config, loaded, exported(config.model, weights=weights))
    served = _interleaved(methods, prompts)
    seconds = {name: [each.seconds for each in rounds[1:]] for name, rounds in served.items()}
    rows = []
    for name, rounds in served.items():
        answers = [each.answer for each in rounds]
        rows.append(
            {
                "method": name,
                "seconds": statistics.median(seconds[name]),
                "rounds": seconds[name],
                "speedups": dict(_against_dense(seconds, name).over),
                "right": sum(map(is_right, prompts, answers)),
                "answers": answers,
            }
        )
    command = None
    if artifact.search is not None:
        command = artifact.search.command
    engine = {"openvino": version("openvino"), "openvino_genai": openvino_genai.__version__}
    return {
        "command": sys.argv,
        "artifact": {"content_sha256": artifact.content_sha256, "command": command},
        "environment": environment() | engine,
        "rows": rows,
        "over_xattention": speedup(seconds[HEADWISE], {XATTENTION: seconds[XATTENTION]}).value,
        "expected": [prompt.answer for prompt in prompts],
    }


def _against_dense(seconds: dict[str, list[float]], name: str) -> Speedup:
    timed = {baseline: seconds[baseline] for baseline in _DENSE if baseline in seconds}
    return speedup(seconds[name], timed)


def _methods(config: argparse.Namespace, loaded: LoadedModel, folder: Path) -> dict[str, _Method]:
    headwise = load_headwise(config.config)

    def serve(prompt: Prompt) -> Served:
        return _by_model(loaded, prompt)

    methods: dict[str, Callable[[], _Method]] = {
        MODEL: lambda: _Method(serve, lambda: dense(loaded.model, MODEL)),
        KERNEL: lambda: _Method(serve, lambda: dense(loaded.model, KERNEL)),
        HEADWISE: lambda: _Method(
            serve, lambda: headwise.apply(loaded.model, check_weights=False, strict=True)
        ),
        OPENVINO: lambda: _Method(_pipeline(config, loaded, folder, sparse=False)),
        XATTENTION: lambda: _Method(_pipeline(config, loaded, folder, sparse=True)),
    }
    return {name: make() for name, make in methods.items() if name not in config.without}


def _interleaved(methods: dict[str, _Method], prompts: Sequence[Prompt]) -> dict[str, list[Served]]:
    """Every prompt by every method, prompt by prompt."""
    served: dict[str, list[Served]] = {name: [] for name in methods}
    for prompt in tqdm(prompts, desc="rounds", disable=None, leave=False):
        for name, method in methods.items():
            with method.enter():
                served[name].append(method.serve(prompt))
    return served


@torch.no_grad()
def _by_model(loaded: LoadedModel, prompt: Prompt) -> Served:
    from transformers import DynamicCache

    model = loaded.model
    cache = DynamicCache(config=text_config(model))
    ids = torch.tensor([prompt.input_ids], dtype=torch.long, device="cpu")
    tokens: list[int] = []
    start = time.perf_counter()
    taken = 0.0
    while len(tokens) < new_tokens(loaded.tokenizer, prompt):
        token = (
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            .logits[0, -1]
            .argmax()
        )
        tokens.append(int(token))
        taken = taken or time.perf_counter() - start
        if tokens[-1] in ends(model, loaded.tokenizer):
            break
        ids = token[None, None]
    return Served(taken, _text(loaded.tokenizer, tokens))


def _pipeline(
    config: argparse.Namespace, loaded: LoadedModel, folder: Path, *, sparse: bool
) -> Callable[[Prompt], Served]:
    """OpenVINO GenAI's pipeline: a prompt in one batch, as many threads as torch has."""
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
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", options, {})

    def serve(prompt: Prompt) -> Served:
        generation = genai.GenerationConfig(max_new_tokens=new_tokens(loaded.tokenizer, prompt))
        generation.do_sample = False
        generation.stop_token_ids = ends(loaded.model, loaded.tokenizer)
        ids = openvino.Tensor(np.array([prompt.input_ids], dtype=np.int64))
        (result,) = pipeline.generate([ids], [generation])
        return Served(
            result.perf_metrics.get_ttft().mean / 1e3,
            _text(loaded.tokenizer, list(result.m_generation_ids[0])),
        )

    return serve


def _text(tokenizer: Any, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


def table(record: dict[str, Any]) -> str:
    """The rows as aligned text, and Headwise's speed-up over XAttention."""
    total = len(record["expected"])
    lines = [["", "prefill s", *COLUMNS, "answers right"]]
    for row in record["rows"]:
        compared = None
        if row["speedups"]:
            compared = Speedup(over=row["speedups"])
        label = _LABELS[row["method"]]
        right = f"{row['right']} of {total}"
        lines.append([label, f"{row['seconds']:.3f}", *cells(compared), right])
    return "\n".join(
        [
            *aligned(lines),
            f"Headwise is {record['over_xattention']:.2f} times as fast as XAttention",
        ]
    )


def main() -> int:
    """Print the table; with --out write the figures."""
    options = parser().parse_args()
    record = run(options)
    print(table(record))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    # This file must not hide the package of the same name.
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    run_command(lambda _: main())
