"""Commands that write a folder and fail leave none."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts import HeadwiseError
from profiling import heatmaps, stream


@pytest.mark.parametrize("command", [heatmaps, stream])
def test_no_empty_folder_is_left(command: object, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words")
    words = ["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "made" / "out")]
    more = ["--text", str(text), "--tokens", "9"] if command is stream else []
    with pytest.raises(HeadwiseError, match="unknown model"):
        command.main([*words, *more])  # type: ignore[attr-defined]
    assert sorted(tmp_path.iterdir()) == [text]
