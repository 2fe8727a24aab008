"""Says that the tests of vLLM itself are not run here."""

from __future__ import annotations

import pytest


def test_vllm() -> None:
    pytest.importorskip(
        "vllm",
        reason=("vLLM is not installed here: `.ci/vllm` runs tests/vllm in its own environment"),
    )
