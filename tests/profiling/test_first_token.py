"""python -m profiling.first_token without vLLM; tests/vllm has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

import artifacts
from profiling.first_token import main


def test_without_vllm_a_measurement_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiling.first_token.find_spec", lambda name: None)
    with pytest.raises(artifacts.HeadwiseError, match=r"vLLM is not installed: pip install 'headwise\[vllm\]'"):
        main([str(tmp_path / "cfg.yaml"), "--model", "tiny"])
