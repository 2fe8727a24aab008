"""The same artifact inside vLLM: a plugin that serves prefill by an artifact's patterns, and vLLM all the rest.

    vllm serve MODEL --additional-config '{"headwise": "cfg.yaml"}'

Importing this package imports neither vllm nor torch. docs/vllm.md says what is served.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Stats", "register", "stats"]


def register() -> None:
    """Make Headwise's backends known to vLLM: the entry point of its plugin, called once or more in every process.

    On a CPU it takes the place of vLLM's only backend; elsewhere it is `--attention-backend CUSTOM`. An engine that is
    given no artifact gets the classes that it would have got without the plugin.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "runtime.vllm.backend.OnCPU")
    register_backend(AttentionBackendEnum.CUSTOM, "runtime.vllm.backend.OnGPU")


def stats(worker: Any = None) -> dict[str, Any]:
    """What this process has served so far, see runtime.vllm.counters.Counters.report; {} where no artifact is at work.

    It takes a worker so that `llm.collective_rpc(stats)` can call it in all of them.
    """
    from runtime.vllm.served import latest

    served = latest()
    return {} if served is None else served.report()


class Stats:
    """`--worker-extension-cls runtime.vllm.Stats` lets `llm.collective_rpc("headwise_stats")` ask every worker."""

    def headwise_stats(self) -> dict[str, Any]:
        """What the worker has served so far."""
        return stats()
