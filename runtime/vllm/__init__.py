"""Plugin for vLLM that serves the layers named by an artifact.

    vllm serve MODEL --additional-config '{"headwise": "cfg.yaml"}'

Importing this package imports neither vllm nor torch. docs/vllm.md lists the supported cases.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Stats", "register", "stats"]


def register() -> None:
    """Make Headwise's backends known to vLLM: its plugin's entry point, called in every process.

    On a CPU it takes the place of vLLM's only backend; elsewhere it is `--attention-backend
    CUSTOM`. An engine without an artifact gets the classes that it would get without the plugin.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "runtime.vllm.backend.OnCPU")
    register_backend(AttentionBackendEnum.CUSTOM, "runtime.vllm.backend.OnGPU")


def stats() -> dict[str, Any]:
    """Counts of this process so far, see engine.Engine.report; {} without an artifact."""
    from runtime.vllm.engine import latest

    engine = latest()
    if engine is None:
        return {}
    return engine.report()


class Stats:
    """Worker extension: `--worker-extension-cls runtime.vllm.Stats` has it in every worker."""

    def headwise_stats(self) -> dict[str, Any]:
        """Counts of the worker, for `llm.collective_rpc("headwise_stats")`."""
        return stats()
