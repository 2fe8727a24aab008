"""What `--worker-extension-cls runtime.vllm.worker.Stats` adds to vLLM's workers."""

from __future__ import annotations

from typing import Any

from runtime.vllm import stats


class Stats:
    """Makes `llm.collective_rpc("headwise_stats")` give what each worker has served."""

    def headwise_stats(self) -> dict[str, Any]:
        """See runtime.vllm.stats."""
        return stats()
