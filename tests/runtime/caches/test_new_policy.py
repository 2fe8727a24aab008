"""CONTRIBUTING's guide "Add a cache policy": a copy of the packages with the three changes
serves the new policy in transformers and vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.additions import add

ROOT = Path(__file__).parents[3]
PACKAGES = ("artifacts", "kernels", "profiling", "runtime", "tests")

# By file: the line to insert before, and the text; no line for a new file.
POLICY = {
    "artifacts/schema/kv_cache.py": {
        "AnyPolicy = ": '''class Edges(Record):
    """the first and the last tokens of each prompt; all that is generated"""

    kind: Literal["edges"] = Field(default="edges", description=__doc__)
    size: Count = Field(description="how many tokens are kept at either end")


''',
        "\nPolicy = ": " | Edges",
    },
    "runtime/caches/edges.py": {
        "": '''"""The first and the last tokens of each prompt, and all that is generated."""

import torch

from runtime.caches.paging import Paging
from runtime.caches.policy import Policy
from runtime.caches.step import View


def ends(length, size, device):
    """Rows (2 * size,) at both ends of `length`."""
    at = torch.arange(size, device=device)
    return torch.cat([at, at + length - size])


def select(record, q, k, v, count, *, logits):
    return ends(k.shape[2], record.size, k.device).expand(*k.shape[:2], -1)


class Edges(Policy):
    """Both ends of each prompt."""

    @classmethod
    def paging(cls, record):
        return Paging(front=2 * record.size, select=select, record=record, queries=1)

    def view(self, step):
        keys, values = self._add(keys=step.k, values=step.v)
        return View(keys, values, self._ends(keys.device) if step.length == 1 else None)

    def update(self, step, scores):
        (held, *_), size = self.cached, self.record.size
        if step.length > 1 and held > 2 * size:
            self._keep(ends(held, size, step.k.device).expand(*step.k.shape[:2], -1))
''',
    },
    "runtime/caches/make.py": {
        "from runtime.caches.h2o": "from runtime.caches.edges import Edges\n",
        '    "snapkv": SnapKV': '    "edges": Edges,\n',
    },
}
CONFORMANCE = {
    "tests/conformance/policy_definitions.py": {
        "DEFINITIONS: ": """def edges(record: Any, head: Head, chunks: Any) -> Result:
    outs = []
    kept: list[int] = []
    for begin, end in chunks:
        for token in range(begin, end):
            kept.append(token)
            outs.append(head.attend(token, kept)[0])
        if end - begin > 1 and len(kept) > 2 * record.size:
            kept = kept[: record.size] + kept[-record.size :]
    return torch.stack(outs, dim=1), kept


""",
        '    "snapkv": snapkv': '    "edges": edges,\n',
    },
    "tests/conformance/test_cache_policies.py": {
        "    Case(SnapKV(budget=16,": "    Case(Edges(size=8)),\n",
        "from runtime import memory_report": "from artifacts.schema.kv_cache import Edges\n",
    },
}

SERVE = """
import sys
from pathlib import Path

import pytest

import artifacts
from artifacts.schema.kv_cache import Edges
from profiling.caches.parsing import CACHES
from runtime.fingerprint import fingerprint
from runtime.vllm.policy_host import paged_policies
from tests.additions import add
from tests.conformance.test_cache_policies import test_every_policy_has_a_case
from tests.runtime.caches.test_new_policy import CONFORMANCE
from tests.runtime.tiny import tiny_model

assert Path(artifacts.__file__).is_relative_to(Path(__file__).parent), artifacts.__file__

# Of help texts and options.
assert "edges" in CACHES.split(", ")

# An artifact in a file, for vLLM. The suite has caches of transformers.
layers = ("both", "both")
artifact = artifacts.Artifact(
    model=fingerprint(tiny_model("Llama"), name="tiny"),
    search=None,
    patterns={},
    prefill=artifacts.Prefill(dense_below=0, layers=(None, None)),
    kv_cache=artifacts.KVCache(policies={"both": Edges(size=5)}, layers=layers),
)
artifacts.save(artifact, "cfg.yaml")
loaded = artifacts.load("cfg.yaml")
(paged, _) = paged_policies(loaded).values()
assert paged.selects and paged.pagings[0].gap(41, prompt=40) == (10, 40)

# The suite fails without a test case.
with pytest.raises(AssertionError):
    test_every_policy_has_a_case()
add(Path(), CONFORMANCE)
for name in ("policy_definitions", "test_cache_policies"):
    del sys.modules[f"tests.conformance.{name}"]
options = ["-q", "-p", "no:cacheprovider", "-n", "0", "-k", "edges or every_policy"]
assert pytest.main([*options, "tests/conformance/test_cache_policies.py"]) == 0
"""


def test_new_policy_needs_three_changes(tmp_path):
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    add(tmp_path, POLICY)
    (tmp_path / "serve.py").write_text(SERVE)
    # A script's folder comes before installed packages.
    done = subprocess.run(
        [sys.executable, "serve.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
