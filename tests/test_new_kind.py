"""CONTRIBUTING's walk "Add a pattern": four places of a copy of the packages get a new kind, and it
is searched, stored, drawn and served there."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

from tests.additions import add
from tests.processes import ROOT, SECONDS, servers

PACKAGES = ("artifacts", "headwise", "kernels", "profiling", "runtime", "search", "tests")

# By file: the line that the text goes before, and the text; no line for a file that is new.
WALK = {
    "artifacts/schema/patterns.py": {
        "AnyPattern = ": '''class Band(PatternRecord):
    """the nearest diagonals of tiles, and the first tile of keys; named `band_4`"""

    named: ClassVar[str] = "band_{tiles}"
    letter: ClassVar[str] = "N"
    color: ClassVar[str] = "#117733"

    kind: Literal["band"] = Field(default="band", description=__doc__)
    tiles: Count = Field(description="diagonals of tiles, the query's own among them")

    def layout(self, length: int) -> Layout:
        return Layout(near=self.tiles, columns=TILE)


''',
        " | SkipSoftmax\n": " | Band",
    },
    "kernels/patterns/band.py": {
        "": '''"""Band: the nearest diagonals of tiles, and the first tile of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.index import TILE
from kernels.patterns.base import Pattern


@dataclass(frozen=True, kw_only=True)
class Band(Pattern):
    """The `tiles` nearest diagonals of tiles, and the first tile of keys."""

    kind: ClassVar[str] = "band"

    tiles: int

    def limits(self) -> tuple[int, int]:
        return TILE, self.tiles
''',
    },
    "kernels/patterns/__init__.py": {
        "from kernels.patterns.base import": "from kernels.patterns.band import Band\n",
        "Dense, AShape, Vert": "Band, ",
    },
    "search/model/candidates.py": {
        '        make("dense"),': '        make("band", tiles=4),\n',
    },
    "tests/kernels/kinds.py": {
        '    "dense": Kind': """    "band": Kind(
        drawn={"tiles": _FEW}, large={"tiles": 5}, small={"tiles": 2}
    ),
""",
        '    make("dense")': '    make("band", tiles=3),\n',
    },
}

SERVE = """
from pathlib import Path

import artifacts
import artifacts.schema.patterns as data
import torch
from artifacts.analysis.density import density
from headwise.__main__ import main
from artifacts.page.artifact import render
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan, make
from profiling.pictures.patterns import figure
from runtime.layers import make_plans
from search.model import search as page
from search.model.candidates import candidate_grid
from search.model.rows import as_artifact_pattern
from search.model.timed_costs import _some_of_each_kind
from tests import test_kinds
from tests.artifacts.conftest import build
from tests.kernels import test_patterns
from tests.tiny_text_model import save_tiny

here = Path(__file__).parent
for package in (artifacts, page):
    assert Path(package.__file__).is_relative_to(here), package.__file__

# The index, by the words of the kind, and attention over it.
length = 500
band = make("band", tiles=3)
torch.manual_seed(0)
q = torch.randn(1, 4, length, 64)
k, v = torch.randn(2, 1, 2, length, 64)
index = LayerPlan([band] * 4, 2).build(q, k)
query = torch.arange(length)[:, None]
key = torch.arange(length)
mask = (key <= query) & ((query // 64 - key // 64 < 3) | (key < 64))
assert torch.equal(index.to_mask(), mask.expand(1, 4, -1, -1))
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
for backend in ("auto", "reference"):
    torch.testing.assert_close(sparse_attention(q, k, v, index, backend=backend), wanted)

# A candidate of the search; an artifact stores and serves it.
assert make("band", tiles=4) in candidate_grid(4096)
record = as_artifact_pattern(band)
assert density(record, length) == float(index.computed_tiles()[0, 0]) / index.causal_tiles
grown = LayerPlan([band], 1, length=256).at(1024).patterns[0]
assert make(**data.grown(record, 256, 1024).model_dump()) == grown
row = ("band_3",) * 4
prefill = artifacts.Prefill(dense_below=0, layers=(row, None, row))
artifacts.save(build(patterns={"band_3": record}, prefill=prefill), here / "cfg.yaml")
loaded, arrays = artifacts.load_pair(here / "cfg.yaml")
assert torch.equal(make_plans(loaded)[0].build(q, k).to_mask(), index.to_mask())

# A search that has no other sparse candidates: it scores, allocates, gates and serves the kind.
grid = (*(make("band", tiles=tiles) for tiles in (1, 2, 4)), make("dense"))
page.candidate_grid = lambda length: grid
save_tiny(here / "model")
limits = "--max-kl 9 --max-perplexity 9 --max-nll 9 --max-lost 1 --cost flops --no-picture"
command = f"--length 512 --task prose --budget 0.8 --dtype float32 {limits}"
words = ["--model", str(here / "model"), "--out", str(here / "found.yaml"), *command.split()]
assert main(["search", *words]) == 0
found, scores = artifacts.load_pair(here / "found.yaml")
assert "band" in found.search.summary.winners, found.search.summary.winners
assert "candidates.0.band_1.objective" in scores
assert {pattern.kind for pattern in _some_of_each_kind(candidate_grid(4096))} >= {"band", "dense"}

# The page and the map.
text = render(loaded, file="cfg.yaml", arrays=arrays, sidecar="none")
assert "map: N band" in text and "NNNN" in text, text
assert {text.get_text() for text in figure(loaded, None).axes[0].texts} == {"N"}

# Tests that every kind goes through.
test_kinds.test_kinds_have_the_same_sizes_and_defaults_in_both_packages()
test_kinds.test_kinds_have_distinct_colors_and_letters()
test_patterns.test_kinds_are_those_of_the_tables()
test_patterns.test_prepared_builder_equals_fresh_builder()
"""


def serve(folder: Path) -> None:
    """Run SERVE with the packages of the copy, in a process that has imported those of others."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    for name, module in list(sys.modules.items()):
        # Not those of Hugging Face's package `kernels`.
        file = Path(getattr(module, "__file__", None) or "/")
        if any(file.is_relative_to(ROOT / package) for package in PACKAGES):
            del sys.modules[name]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / "serve.py"), run_name="__main__")


def test_new_kind_in_four_places_is_served(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    add(tmp_path, WALK)
    (tmp_path / "serve.py").write_text(SERVE, encoding="utf-8")
    process = servers.Process(target=serve, args=(tmp_path,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
