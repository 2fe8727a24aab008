"""python -m tests.vllm.fits: how many requests are served at once in the same memory, with SnapKV
and without.

A random model of two layers with SmolLM2's heads: what fits depends on neither. Each prompt is
computed whole, and all layers keep as much of it as `--budget` says. It prints the pages of a layer
that a request holds while it decodes, and the most requests that ran at once."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import artifacts
from artifacts.cli.command import ArgumentParser, run_command
from tests.vllm.engines import Engine, Transformers, engine


def watch(served: Engine) -> tuple[list[int], list[int]]:
    """Lists that grow with each step: the pages in use, and the requests that run."""
    core = served.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, pages = core.schedule, core.kv_cache_manager.block_pool
    whole = pages.get_num_free_blocks()
    used: list[int] = []
    running: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        planned = schedule(*args, **kwargs)
        used.append(whole - pages.get_num_free_blocks())
        running.append(len(core.running))
        return planned

    core.schedule = watched
    return used, running


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    p = ArgumentParser(prog="python -m tests.vllm.fits", description=__doc__)
    p.add_argument("--length", type=int, default=8000, help="tokens of a prompt (default 8000)")
    p.add_argument("--tokens", type=int, default=100, help="how many to generate (default 100)")
    p.add_argument(
        "--budget", type=int, default=1024, help="tokens kept of a prompt (default 1024)"
    )
    p.add_argument("--room", type=int, default=8, help="the memory, in whole requests (default 8)")
    p.add_argument(
        "--requests", type=int, default=56, help="how many are asked for at once (default 56)"
    )
    options = p.parse_args(argv)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from runtime.fingerprint import fingerprint
    from tests.runtime.conftest import search_info
    from tests.vllm.conftest import prompt

    size = {"hidden_size": 576, "intermediate_size": 64, "vocab_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config = LlamaConfig(
        **size, **heads, max_position_embeddings=options.length + options.tokens, eos_token_id=None
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        made = artifacts.Artifact(
            model=fingerprint(Transformers(folder).model, name="tiny"),
            search=search_info(),
            patterns={},
            prefill=artifacts.Prefill(dense_below=2048, layers=(None, None)),
            kv_cache=artifacts.KVCache(
                policies={"s": artifacts.SnapKV(budget=options.budget)}, layers=("s", "s")
            ),
        )
        path = Path(folder) / "cfg.yaml"
        artifacts.save(made, path)
        page = 128
        pool = options.room * -(-(options.length + options.tokens) // page) + 1
        settings = {
            "block_size": page,
            "num_gpu_blocks_override": pool,
            "max_num_seqs": options.requests,
        }
        for name, given in (("everything", None), (f"{options.budget} of each prompt", str(path))):
            with engine(
                folder, given, dtype="bfloat16", max_num_batched_tokens=options.length, **settings
            ) as served:
                used, running = watch(served)
                served.tokens([prompt(options.length)], options.tokens)
                one = used[-1]
                served.tokens(
                    [prompt(options.length, i) for i in range(options.requests)], options.tokens
                )
                print(
                    json.dumps(
                        {
                            "kept": name,
                            "pages": pool - 1,
                            "of one request": one,
                            "at once": max(running),
                        }
                    )
                )
    return 0


if __name__ == "__main__":
    run_command(main)
