from __future__ import annotations

import json

import pytest

from artifacts import HeadwiseError
from profiling import startup


def test_every_figure_is_measured(capsys, tmp_path):
    out = tmp_path / "startup.json"
    words = ["--layers", "3", "--heads", "4", "--repeats", "2", "--processes", "1", "--json", str(out)]
    assert startup.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(out.read_text())
    assert found["layers"] == 3 and found["heads"] == 4
    for name in ("load_ms", "load_own_patterns_ms", "import_torch_s", "import_runtime_s"):
        assert found[name] > 0
    assert lines[1].startswith("load 3 layers x 4 heads, a pattern each")


def test_heads_use_all_patterns_in_turn():
    artifact = startup.example(3, 4, 5)
    assert len(artifact.patterns) == 5 and artifact.prefill.layers[1] == ("vs_4", "vs_0", "vs_1", "vs_2")
    assert len(startup.example(3, 4, 100).patterns) == 12


@pytest.mark.parametrize("name", ["layers", "heads", "repeats", "processes"])
def test_sizes_that_are_none(name):
    with pytest.raises(HeadwiseError, match=f"--{name} must be at least 1, got 0"):
        startup.main([f"--{name}", "0"])
