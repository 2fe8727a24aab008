"""CONTRIBUTING's walk "Add a pattern": four files of a copy of the packages get a new kind, and it
is searched, stored, drawn and served there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("artifacts", "kernels", "profiling", "runtime", "search", "tests")

# By file: the line that the text goes before, and the text.
WALK = {
    "artifacts/schema/patterns.py": {
        "AnyPattern = (": '''class Comb(PatternRecord):
    """every n-th diagonal of tiles; named `comb_4`"""

    named: ClassVar[str] = "comb_{step}"
    letter: ClassVar[str] = "C"
    colour: ClassVar[str] = "#117733"

    kind: Literal["comb"] = Field(default="comb", description=__doc__)
    step: Count = Field(description="n, from the query's own tile")

    def layout(self, length: int) -> Layout:
        return Layout(near=1, end=num_tiles(length), step=self.step, columns=TILE)


''',
        "    | SkipSoftmax\n": "    | Comb\n",
    },
    "kernels/patterns/fixed.py": {
        "FIXED: ": '''@dataclass(frozen=True, kw_only=True)
class Comb(Fixed):
    """Every `step`-th diagonal of tiles, and the first tile of keys."""

    kind: ClassVar[str] = "comb"

    step: int

    @classmethod
    def entries(
        cls, patterns: Sequence[Self], k_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        steps = [p.step for p in patterns]
        counts = [-(-num_tiles(k_len) // step) for step in steps]
        return counted(counts, steps, device), sink_columns([1] * len(patterns), k_len, device)


''',
        "AShape, TriShape": "Comb, ",
    },
    "search/model/candidates.py": {
        '        make("dense"),': '        make("comb", step=4),\n',
    },
    "tests/kernels/kinds.py": {
        '    "dense": Kind': """    "comb": Kind(
        drawn={"step": _FEW}, large={"step": 2}, small={"step": 5}
    ),
""",
        '    make("dense")': '    make("comb", step=3),\n',
    },
}

SERVE = """
import sys
from pathlib import Path

import artifacts
import pytest
import torch
from artifacts.analysis.density import density
from artifacts.page.artifact import render
from artifacts.page.head import picture
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan, make
from profiling.pattern_map import figure
from runtime.layers import layer_plans
from search.model.candidates import candidate_grid
from search.model.rows import as_artifact_pattern
from tests.artifacts.conftest import build

here = Path(__file__).parent
assert Path(artifacts.__file__).is_relative_to(here), artifacts.__file__

# The index, by the words of the kind, and attention over it.
length = 500
comb = make("comb", step=3)
torch.manual_seed(0)
q = torch.randn(1, 4, length, 64)
k, v = torch.randn(2, 1, 2, length, 64)
index = LayerPlan([comb] * 4, 2).build(q, k)
query = torch.arange(length)[:, None]
key = torch.arange(length)
mask = (key <= query) & (((query // 64 - key // 64) % 3 == 0) | (key < 64))
assert torch.equal(index.to_mask(), mask.expand(1, 4, -1, -1))
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
for backend in ("auto", "reference"):
    torch.testing.assert_close(sparse_attention(q, k, v, index, backend=backend), wanted)

# A candidate of the search, and what an artifact writes and serves of it.
assert make("comb", step=4) in candidate_grid(4096)
record = as_artifact_pattern(comb)
assert density(record, length) == float(index.computed_tiles()[0, 0]) / index.causal_tiles
row = ("comb_3",) * 4
prefill = artifacts.Prefill(dense_below=0, layers=(row, None, row))
artifacts.save(build(patterns={"comb_3": record}, prefill=prefill), here / "cfg.yaml")
loaded, arrays = artifacts.load_pair(here / "cfg.yaml")
assert torch.equal(layer_plans(loaded)[0].build(q, k).to_mask(), index.to_mask())

# The page, the map, and the picture of a head.
page = render(loaded, file="cfg.yaml", arrays=arrays, sidecar="none")
assert "map: C comb" in page and "CCCC" in page, page
assert {text.get_text() for text in figure(loaded, None).axes[0].texts} == {"C"}
assert picture(record, length)

# Suites that every kind goes through.
suites = [
    "tests/test_kinds.py",
    "tests/kernels/test_index.py::test_every_kind_is_in_the_tables",
    "tests/kernels/test_patterns.py::test_a_prepared_builder_gives_what_a_fresh_one_gives",
]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", *suites]))
"""


def test_a_new_kind_touches_four_files_and_is_served(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, additions in WALK.items():
        path = tmp_path / file
        text = path.read_text(encoding="utf-8")
        for before, addition in additions.items():
            assert before in text, f"{file} has no {before!r}: change CONTRIBUTING and this walk"
            text = text.replace(before, addition + before, 1)
        path.write_text(text, encoding="utf-8")
    script = tmp_path / "serve.py"
    script.write_text(SERVE, encoding="utf-8")
    served = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert served.returncode == 0, served.stdout + served.stderr
