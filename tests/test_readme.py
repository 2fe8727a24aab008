"""README.md's blocks run from top to bottom, as a reader would run them, on a tiny model in an
empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from search.__main__ import main
from tests.tiny_text_model import save_tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# What a block is in, and its text.
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
# What makes a command small; one that is not here fails until it says so.
SMALL = {
    "search": "--length 512 --budget 0.8 --dtype float32 --cost flops --n-trials 1 --task prose "
    "--max-kl 9 --max-perplexity 9",
    "gate": "--length 512 --dtype float32 --task prose --max-kl 9 --max-perplexity 9",
    "evaluate": "--length 512 --dtype float32 --task passkey --samples 1 --no-speed "
    "--methods headwise",
    "doctor": "",
}
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


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([\w-]+)", README))
    assert named and named <= targets


@pytest.mark.slow
def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers

    tiny = save_tiny(tmp_path / "tiny", max_position_embeddings=2048)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.randint(3, 250, (1, 512), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"model": model, "inputs": {"input_ids": ids, "max_new_tokens": 3}}
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    for kind, block in BLOCKS:
        if kind == "python":
            code = block.replace('"smollm2"', f'"{tiny}"').replace("* 160", "* 4")
            exec(compile(code, "README.md", "exec"), names)
        elif not kind:
            for words in commands(block):
                if words[0] in LEFT_OUT or (typed := small(words, tiny)) in ran:
                    continue
                assert not main(typed), shlex.join(words)
                ran.append(typed)
    assert {words[0] for words in ran} == set(SMALL) and "loaded" in names
