"""Mixed into a parent's metadata builder: parts each step's batch for the layers that are served here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES
from runtime.vllm.batch import (
    KEY,
    Batch,
    Piece,
    parted_at_prompts,
    prefills_of,
    requests_of,
    special,
)
from runtime.vllm.counters import DENSE, SPARSE
from runtime.vllm.served import Served, served
from runtime.vllm.snapkv import Snap

# Whatever the parent is.
_Parent: Any = object


class SparseBuilder(_Parent):
    """AttentionMetadataBuilder of a parent, which parts a step's batch."""

    # The metadata of one group of layers is not that of another with other pages put in: the parts have pages, too.
    supports_update_block_table: bool = False
    parent: type
    # Whether a step is built to be captured in a graph and replayed for others.
    _captured: bool = False

    def __new__(cls, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # The class is asked for where no configuration is known.
        if served(vllm_config) is None:
            return cls.parent(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        self._served: Served | None = None
        at_work = served(vllm_config)
        assert at_work is not None
        every = get_layers_from_vllm_config(vllm_config, Attention)
        at_work.say(list(every.values()))
        layers = [every[name] for name in layer_names if name in every]
        here = [at_work.of(layer) for layer in layers]
        # Whether a layer of the group drops tokens, and whether it keeps a part of each prompt.
        self._keeps = any(layer.keeps is not None for layer in here)
        self._snaps = any(isinstance(layer.keeps, Snap) for layer in here)
        # Whether the parent could read what the group's layers cache. One that is not served has an impl of vLLM's.
        plain = not any(at.owns and layer.impl.ours for layer, at in zip(layers, here, strict=True))
        self._readable = plain and not self._keeps
        self._told_prompts = at_work.asks_prompts
        if self._told_prompts:
            # vLLM hands builders the lengths of prompts where a model has a window over what it generates (R-SWA). It
            # reads this only when a layer or a builder is made and a step begins: no layer's attention changes.
            vllm_config.model_config.model_arch_config.rswa_window = at_work.longest
        if any(layer.owns for layer in here):
            self._served = at_work
            if at_work.counting is None:
                at_work.counting = self

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """The parent's, without graphs of what depends on the host: what was chosen for one prompt, and how many keys.

        Decode over every key can be replayed, and what decodes by chosen tokens where each request has one new token
        (see Chooser.attend).
        """
        from vllm.v1.attention.backend import AttentionCGSupport as Support

        parents, at_work = super().get_cudagraph_support(vllm_config, kv_cache_spec), served(vllm_config)
        if at_work is None:
            return parents
        chooser, ours = at_work.chooser, Support.UNIFORM_BATCH
        drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0
        if at_work.artifact.kv_cache is not None or drafts >= MAX_QUERIES or not (chooser is None or chooser.captures):
            ours = Support.NEVER
        elif chooser is not None:
            ours = Support.UNIFORM_SINGLE_TOKEN_DECODE
        return min(parents, ours, key=lambda support: support.value)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """The parent's; a decode section is captured for contexts of any length."""
        self._captured = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._captured = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The parent's metadata of the whole step, and beside it what is sparse of it."""
        common = common_attn_metadata
        prompts = common.rswa_prefix_lens if self._told_prompts else None
        if prompts is not None:
            common = replace(common, rswa_prefix_lens=None)
        metadata = super().build(common_prefix_len, common, fast_build)
        if self._served is None:
            return metadata
        chooser, every = self._served.chooser, self._requests(common, prompts)
        prefills = prefills_of(common, every)
        long = tuple(filter(self._served.is_long, prefills))
        chosen, gaining = ((), []) if chooser is None else chooser.groups(every, common, captured=self._captured)
        if self._served.counting is self and not self._captured:
            pieces = [(SPARSE, piece.q_len) for piece in long]
            why = DENSE if self._served.dense else "short"
            pieces += [(why, piece.q_len) for piece in set(prefills).difference(long, gaining)]
            self._served.counters.step(pieces, len(gaining))
        if every:
            batch = Batch(
                every=every,
                pieces=long,
                chosen=chosen,
                block_table=common.block_table_tensor,
                lengths=None if self._keeps else common.seq_lens,
                captured=self._captured,
            )
            setattr(metadata, KEY, batch)
        return metadata

    def _requests(self, common: Any, prompts: Tensor | None) -> tuple[Piece, ...]:
        """The requests of a step, none where the parent serves all of it; prompts: the lengths of theirs."""
        assert self._served is not None
        chooser = self._served.chooser
        if special(common) and not self._readable:
            raise HeadwiseError("a step is not plainly causal, and vLLM cannot read the cache of a layer served here")
        every = requests_of(common, lambda q_len: self._keeps or (chooser is not None and chooser.takes(q_len)))
        if self._snaps:
            assert prompts is not None
            every = parted_at_prompts(every, prompts.tolist())
        return every
