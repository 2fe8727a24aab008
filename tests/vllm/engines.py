"""vLLM engines in this process, and Headwise in transformers with the same chunks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from runtime import load

# Set before vllm is imported: one process, one thread, a small cache.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM would bind each CPU process to a separate NUMA node.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# No downloads and no usage reports.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Engine:
    """vLLM engine that records its scheduling.

    It records the chunks of each prompt, the drafts of each step, the pages in use and the running
    requests.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.cuts: dict[str, list[int]] = {}
        self.drafts: dict[str, list[list[int]]] = {}
        self.used: list[int] = []
        self.running: list[int] = []
        self.scheduler = scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, pool = scheduler.schedule, scheduler.kv_cache_manager.block_pool
        whole = pool.get_num_free_blocks()

        def recorded(*args: Any, **kwargs: Any) -> Any:
            planned = schedule(*args, **kwargs)
            self.used.append(whole - pool.get_num_free_blocks())
            self.running.append(len(scheduler.running))
            for new in planned.scheduled_new_reqs:
                self.cuts[new.req_id] = [new.num_computed_tokens]
            for request, tokens in planned.num_scheduled_tokens.items():
                self.cuts[request].append(tokens)
                drafts = planned.scheduled_spec_decode_tokens.get(request, [])
                self.drafts.setdefault(request, []).append(list(drafts))
            return planned

        scheduler.schedule = recorded

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int = 8, **sampling: Any
    ) -> list[Any]:
        """Return the finished requests, decoded greedily, in prompt order."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling
        )
        return list(
            self.llm.generate(
                [{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False
            )
        )

    def tokens(self, prompts: Sequence[Sequence[int]], tokens: int = 8) -> list[list[int]]:
        """Return the generated tokens of each prompt."""
        return [list(done.outputs[0].token_ids) for done in self.generate(prompts, tokens)]

    def cut(self, done: Any) -> tuple[int, list[int]]:
        """Return the number of cached prompt tokens of a finished request, and the lengths of
        its chunks."""
        (request,) = [
            name
            for name in self.cuts
            if name.partition("-")[0] == done.request_id.partition("-")[0]
        ]
        cached, *chunks = self.cuts[request]
        left, prompt = len(done.prompt_token_ids) - cached, []
        while left:
            prompt.append(chunks.pop(0))
            left -= prompt[-1]
        return cached, prompt


@contextmanager
def engine(model: str, artifact: str | None = None, **settings: Any) -> Iterator[Engine]:
    """Run an engine in this process, in fp32, with or without an artifact."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    options |= {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 16384,
        "disable_log_stats": True,
    } | settings
    if artifact is not None:
        options["additional_config"] = {"headwise": artifact}
    running = None
    try:
        running = Engine(LLM(model=model, **options))
        yield running
    finally:
        if running is not None:
            running.llm.llm_engine.engine_core.shutdown()
        del running
        gc.collect()
        cleanup_dist_env_and_memory()


class Transformers:
    """Greedy generation in transformers, with an artifact or dense."""

    def __init__(self, folder: str, model: Any = None) -> None:
        """Load the model from a folder, or use a loaded one."""
        from transformers import AutoModelForCausalLM

        self.model = (
            model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        )

    def tokens(
        self,
        prompt: Sequence[int],
        chunks: Sequence[int] | None = None,
        *,
        artifact: str | None = None,
        tokens: int = 8,
    ) -> list[int]:
        """Return the generated tokens; `chunks` are the lengths of the prompt's chunks."""
        with self._applied(artifact):
            cache = self._new_cache(artifact)
            return self._generate(cache, prompt, chunks or [len(prompt)], tokens)

    def verified(
        self, prompt: Sequence[int], drafts: Sequence[Sequence[int]], *, artifact: str, tokens: int
    ) -> list[int]:
        """Return the generated tokens when drafts are verified step by step, in one call with
        the token before them."""
        with self._applied(artifact):
            cache = self._new_cache(artifact)
            output = self._generate(cache, prompt, [len(prompt)], 1)
            for drafted in drafts:
                out = self.model(
                    torch.tensor([[output[-1], *drafted]]), past_key_values=cache, use_cache=True
                )
                best = out.logits[0].argmax(-1).tolist()
                right = next(
                    (i for i, token in enumerate(drafted) if token != best[i]), len(drafted)
                )
                output += best[: right + 1]
                if right < len(drafted):
                    cache.crop(cache.get_seq_length() - (len(drafted) - right))
        return output[:tokens]

    def continued(
        self,
        first: Sequence[int],
        second: Sequence[int],
        reused: int,
        chunks: Sequence[int],
        *,
        artifact: str,
        tokens: int = 8,
    ) -> tuple[list[int], list[int]]:
        """Return the tokens generated for a whole prompt, and for a second that reuses `reused`
        of its keys and values."""
        with self._applied(artifact):
            cache = self._new_cache(artifact)
            whole = self._generate(cache, first, [len(first)], tokens)
            if reused:
                # Keys of generated tokens are removed, too.
                cache.crop(reused)
                return whole, self._generate(cache, second, chunks, tokens)
            return whole, self._generate(self._new_cache(artifact), second, chunks, tokens)

    def _new_cache(self, artifact: str | None) -> Any:
        from transformers import DynamicCache

        if artifact is None:
            return DynamicCache(config=self.model.config)
        return load(artifact).new_cache(self.model)

    @contextmanager
    def _applied(self, artifact: str | None) -> Iterator[None]:
        applied = None if artifact is None else load(artifact).apply(self.model)
        try:
            with torch.inference_mode():
                yield
        finally:
            if applied is not None:
                applied.undo()

    def _generate(
        self, cache: Any, prompt: Sequence[int], chunks: Sequence[int], tokens: int
    ) -> list[int]:
        at = cache.get_seq_length()
        for length in chunks:
            ids = torch.tensor([list(prompt[at : at + length])])
            out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            at += length
        assert at == len(prompt)
        output = [int(out.logits[0, -1].argmax())]
        while len(output) < tokens:
            out = self.model(torch.tensor([output[-1:]]), past_key_values=cache, use_cache=True)
            output.append(int(out.logits[0, -1].argmax()))
        return output
