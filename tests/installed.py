"""An installed wheel finds an artifact and serves it, away from the checkout; `.ci/wheel`
runs this.

python tests/installed.py FOLDER               in the wheel's environment; files go into FOLDER
python tests/installed.py FOLDER --prebuilt   without a compiler: the wheel brings native code
python tests/installed.py FOLDER --serve-only  serves an artifact of an earlier search
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers

# After the environment's own packages, of which some have folders of tests of the same names.
sys.path.append(str(Path(__file__).parent))
from tiny_text_model import save_tiny

SCRIPT = Path(sys.executable).with_name("headwise")
SEARCH = (sys.executable, "-m", "headwise", "search", "--model", "model", "--out")


def output(*command: str | Path, folder: Path) -> str:
    """The standard output of a command that must end with 0."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def check_packages() -> None:
    """Every package is the environment's own."""
    import artifacts
    import headwise as python
    import kernels.index
    import profiling
    import runtime

    for package in (artifacts, python, kernels.index, profiling, runtime):
        assert Path(sys.prefix) in Path(package.__file__ or "").parents, (
            f"{package.__name__} is not the installed one"
        )


def search(folder: Path) -> None:
    options = "--preset paper --length 512 --budget 0.6 --task passkey --dtype float32"
    output(*SEARCH, "cfg.yaml", *options.split(), folder=folder)
    output(SCRIPT, "validate", "cfg.yaml", folder=folder)
    assert "LlamaForCausalLM: 3 layers" in output(SCRIPT, "show", "cfg.yaml", folder=folder)
    assert "all is well" in output(SCRIPT, "doctor", "--model", "model", folder=folder)


def serve(folder: Path) -> None:
    from headwise import load

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = torch.randint(3, 250, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense = model(ids).logits
        with load(folder / "cfg.yaml").apply(model, strict=True) as handle:
            sparse = model(ids).logits
            tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert handle.stats()["sparse"] == 6, handle.stats()
    assert tokens.shape == (1, 516)
    assert torch.isfinite(sparse).all() and not torch.equal(sparse, dense)


def check_that_a_search_says_what_it_needs(folder: Path) -> None:
    assert not any(importlib.util.find_spec(name) for name in ("gguf", "matplotlib", "optuna"))
    done = subprocess.run([*SEARCH, "again.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2, done
    assert done.stderr == "error: matplotlib is not installed: pip install 'headwise[search]'\n", (
        done.stderr
    )


def main(folder: Path, *, prebuilt: bool, serve_only: bool) -> None:
    if prebuilt:
        # No compiler is found, and nothing was compiled before.
        os.environ.update(PATH=str(folder), HEADWISE_CACHE=str(folder / "cache"))
        os.environ.pop("CXX", None)
    from kernels.native import build

    check_packages()
    reason = build.load()
    assert reason is None, reason
    assert not prebuilt or not build.cache_folder().exists()
    if serve_only:
        check_that_a_search_says_what_it_needs(folder)
    else:
        save_tiny(folder / "model", max_position_embeddings=2048)
        search(folder)
    serve(folder)
    print(
        f"{'served' if serve_only else 'searched and served'} from {sys.prefix}, Python "
        f"{sys.version.split()[0]}"
    )


if __name__ == "__main__":
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path)
    p.add_argument("--prebuilt", action="store_true")
    p.add_argument("--serve-only", action="store_true")
    options = p.parse_args()
    main(options.folder.resolve(), prebuilt=options.prebuilt, serve_only=options.serve_only)
