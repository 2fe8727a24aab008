"""An artifact, both dense attentions and OpenVINO GenAI, on the same prompts.

    pip install 'openvino-genai>=2026.4'
    python benchmarks/openvino.py cfg.yaml --model smollm2 --length 8192

OpenVINO GenAI serves the model densely and with XAttention, its sparse prefill. All are
interleaved; a prompt is served once by each, for the time to its first token and for its answer.
The model is exported once, into Headwise's cache folder, as a stateful graph in fp16, whose
attention OpenVINO's pipelines replace by theirs: decoders whose layers all attend to everything.
optimum-intel exports more, but not with the transformers that Headwise runs with.

Shapes: B batch, S new tokens, P past tokens, G KV heads, D head dim.
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
from torch import Tensor, nn
from tqdm import tqdm

from artifacts import HeadwiseError, load_pair
from artifacts.cli.command import run_command
from artifacts.page.layout import aligned
from profiling.environment import environment
from profiling.models.cache import made_once
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
from runtime.layers import attention_layers, sliding_layers, text_config

OPENVINO = "openvino"
XATTENTION = "xattention"
_LABELS = {**LABELS, OPENVINO: "OpenVINO GenAI, dense", XATTENTION: "OpenVINO GenAI, XAttention"}
# What a speed-up is against the best of.
_DENSE = (MODEL, KERNEL, OPENVINO)
_INPUTS = ("input_ids", "attention_mask", "position_ids")
_FILE = "openvino_model.xml"
# The new and the past tokens of the example that is traced: both sizes stay free.
_NEW = 3
_PAST = 5


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
        help="XAttention's: share of the scores kept (default 0.9)",
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
class _Way:
    """Serving of a prompt by one method, and the context it is served in."""

    serve: Callable[[Prompt], Served]
    enter: Callable[[], AbstractContextManager[object]] = nullcontext


def run(config: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the figures with what they depend on.

    Raises:
        HeadwiseError: anything that the user has to put right.
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
    how = {"length": config.length, "samples": config.repeats + 1, "seed": config.seed}
    prompts = make_prompts(config.task, loaded.tokenizer, **how)
    if any(prompt.answer is None or prompt.turn for prompt in prompts):
        raise HeadwiseError(
            f"--task {config.task} has no answer at the end of its prompts: take one that retrieves"
        )
    weights = artifact.model.weights_sha256
    if weights is None:
        raise HeadwiseError(
            f"{config.config} does not say which weights it is for: search it again"
        )
    found = _in_turn(_ways(config, loaded, exported(config.model, weights=weights)), prompts)
    seconds = {name: [one.seconds for one in served[1:]] for name, served in found.items()}
    return {
        "command": sys.argv,
        "artifact": {
            "content_sha256": artifact.content_sha256,
            "command": artifact.search.command if artifact.search else None,
        },
        "environment": environment()
        | {"openvino": version("openvino"), "openvino_genai": openvino_genai.__version__},
        "rows": [
            {
                "method": name,
                "seconds": statistics.median(seconds[name]),
                "rounds": seconds[name],
                "speedups": dict(_against_dense(seconds, name).over),
                "right": sum(
                    is_right(prompt, one.answer)
                    for prompt, one in zip(prompts, served, strict=True)
                ),
                "answers": [one.answer for one in served],
            }
            for name, served in found.items()
        ],
        "over_xattention": speedup(seconds[HEADWISE], {XATTENTION: seconds[XATTENTION]}).value,
        "expected": [prompt.answer for prompt in prompts],
    }


def _against_dense(seconds: dict[str, list[float]], name: str) -> Speedup:
    return speedup(seconds[name], {each: seconds[each] for each in _DENSE if each in seconds})


def _ways(config: argparse.Namespace, loaded: LoadedModel, folder: Path) -> dict[str, _Way]:
    headwise = load_headwise(config.config)

    def serve(prompt: Prompt) -> Served:
        return _by_model(loaded, prompt)

    ways: dict[str, Callable[[], _Way]] = {
        MODEL: lambda: _Way(serve, lambda: dense(loaded.model, MODEL)),
        KERNEL: lambda: _Way(serve, lambda: dense(loaded.model, KERNEL)),
        HEADWISE: lambda: _Way(
            serve, lambda: headwise.apply(loaded.model, check_weights=False, strict=True)
        ),
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
    made = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", options, {})

    def serve(prompt: Prompt) -> Served:
        generation = genai.GenerationConfig(max_new_tokens=new_tokens(loaded.tokenizer, prompt))
        generation.do_sample = False
        generation.stop_token_ids = ends(loaded.model, loaded.tokenizer)
        ids = openvino.Tensor(np.array([prompt.input_ids], dtype=np.int64))
        (result,) = made.generate([ids], [generation])
        return Served(
            result.perf_metrics.get_ttft().mean / 1e3,
            _text(loaded.tokenizer, list(result.m_generation_ids[0])),
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
        lines.append(
            [_LABELS[row["method"]], f"{row['seconds']:.3f}", *found, f"{row['right']} of {total}"]
        )
    return "\n".join(
        [
            *aligned(lines),
            f"Headwise is {record['over_xattention']:.2f} times as fast as XAttention",
        ]
    )


def exported(spec: str, *, weights: str, revision: str | None = None) -> Path:
    """The folder of a model's export, made once and kept in the cache folder.

    Args:
        spec, revision: as load_model has them.
        weights: the hash of its weights: other ones are exported anew.

    Raises:
        HeadwiseError: a model whose layers slide; the cache folder cannot be written.
    """
    key = f"{weights[:24]}-{version('openvino')}-{version('transformers')}"

    def make(folder: Path) -> None:
        folder.mkdir()
        export(load_model(spec, dtype="float32", revision=revision), folder)

    return made_once("openvino", key, make, name=spec)


def export(loaded: LoadedModel, folder: Path) -> None:
    """Write a model's graph in fp32 and its config into an existing folder; weights become fp16.

    Raises:
        HeadwiseError: a model that this is not for.
    """
    import openvino

    model = loaded.model
    config = text_config(loaded.model)
    modules = attention_layers(model)
    if sliding_layers(modules) or len(modules) != config.num_hidden_layers:
        raise HeadwiseError(
            f"cannot export {loaded.name}: not all of its layers attend to every token"
        )
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers
    past = [torch.zeros(1, heads, _PAST, dim) for _ in range(2 * layers)]
    ids = torch.ones(1, _NEW, dtype=torch.long)
    seen = torch.ones(1, _PAST + _NEW, dtype=torch.long)
    example = (ids, seen, torch.arange(_PAST, _PAST + _NEW)[None], *past)
    with torch.no_grad():
        graph = openvino.convert_model(_Step(model).eval(), example_input=example)
    _name(graph, layers, (heads, dim))
    _make_stateful(graph, layers, (heads, dim))
    openvino.save_model(graph, folder / _FILE, compress_to_fp16=True)
    config.save_pretrained(folder)


class _Held:
    """Keys and values of all layers (B, G, P, D) as transformers' cache; `new` are a step's."""

    is_compileable = False

    def __init__(self, past: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._past = past
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        before = self._past[layer]
        self.new[layer] = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        return self.new[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._past[layer][0].shape[2]


class _Step(nn.Module):
    """A model's forward with its cache as tensors: what a graph can be traced from."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits (B, S, V), then keys and values of each layer."""
        new = input_ids.shape[1]
        seen = attention_mask.shape[1]
        at = torch.arange(seen)
        behind = at[None, :] <= at[seen - new :, None]
        mask = torch.where(behind, 0.0, torch.finfo(torch.float32).min)[None, None]
        held = _Held(list(zip(past[::2], past[1::2], strict=True)))
        logits = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=held,
            use_cache=True,
        ).logits
        return logits, *(tensor for layer in sorted(held.new) for tensor in held.new[layer])


def _states(layers: int) -> list[tuple[str, str]]:
    """Names of a graph's inputs and outputs of keys and values, as OpenVINO GenAI wants them."""
    return [
        (f"past_key_values.{layer}.{what}", f"present.{layer}.{what}")
        for layer in range(layers)
        for what in ("key", "value")
    ]


def _name(graph: Any, layers: int, of_head: tuple[int, int]) -> None:
    """Name inputs and outputs, and leave batch and lengths free."""
    import openvino

    heads, dim = of_head
    states = _states(layers)
    for port, name in zip(graph.inputs, [*_INPUTS, *(past for past, _ in states)], strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        shape = [-1, -1] if name in _INPUTS else [-1, heads, -1, dim]
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(
        graph.outputs, ["logits", *(present for _, present in states)], strict=True
    ):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()


def _make_stateful(graph: Any, layers: int, of_head: tuple[int, int]) -> None:
    """Turn keys and values into states that begin empty, whose rows the input beam_idx picks."""
    import numpy as np
    import openvino
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    heads, dim = of_head
    states = _states(layers)
    beams = ops.parameter(
        name="beam_idx", dtype=openvino.Type.i32, shape=openvino.PartialShape([-1])
    )
    beams.output(0).get_tensor().add_names({"beam_idx"})
    graph.add_parameters([beams])
    for past, _ in states:
        port = graph.input(past)
        users = port.get_target_inputs()
        picked = ops.gather(port, beams, ops.constant(0))
        for user in users:
            user.replace_source_output(picked.output(0))
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, dict(states))
    batch = ops.gather(
        ops.shape_of(graph.input("input_ids"), output_type="i64"),
        ops.constant([0]),
        ops.constant(0),
    )
    rest = ops.constant(np.array([heads, 0, dim], dtype=np.int64))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            zero = ops.constant(0.0, dtype=node.get_output_element_type(0))
            node.set_arguments([ops.broadcast(zero, ops.concat([batch, rest], axis=0))])
    graph.validate_nodes_and_infer_types()


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
