"""A backend of every op, for tests: it counts its calls, and the reference serves them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kernels import registry
from kernels.call import AttentionCall, DecodeCall, GradientCall
from kernels.decode.dropping import EvictCall
from kernels.patterns.base import SelectCall
from kernels.patterns.block_sparse import MeansCall
from kernels.patterns.last_queries import EstimateCall
from kernels.topk import TopKCall

OPS = {
    AttentionCall: "attention",
    DecodeCall: "decode",
    GradientCall: "gradient",
    EstimateCall: "estimate",
    MeansCall: "means",
    SelectCall: "select",
    TopKCall: "top_k",
    EvictCall: "evict",
}
served: Counter[str] = Counter()


def supports(call: Any) -> str | None:
    """The reason why this backend cannot serve the call: another device."""
    if call.device.type != "cpu":
        return f"it is a toy for the CPU, not for {call.device.type}"
    return None


def run(call: Any) -> Any:
    """The result of a call."""
    op = OPS[type(call)]
    served[op] += 1
    return registry.implementation(op, "reference").run(call)
