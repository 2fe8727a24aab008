"""CONTRIBUTING's guides for methods, caches, tasks, pictures and formats: one file of the packages
each."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.additions import add

ROOT = Path(__file__).parents[1]
PACKAGES = ("artifacts", "kernels", "profiling", "runtime", "search", "headwise")

TASK = {
    "profiling/prompts/tasks/echo.py": {
        "": '''"""A word that is to be repeated."""

from profiling.prompts.haystacks import padding
from profiling.prompts.kind import Evidence, Prompt, Request, task


@task("echo", asks="a word", source="nobody")
def echo(request: Request) -> list[Prompt]:
    """Ask for a number after a text."""

    def make_prompt(rng):
        number = str(rng.randrange(1000, 9999))
        fact, question = request.encode.each([f"The number is {number}.", " The number is"])
        text = padding(request.encode, request.room(fact, question))
        ids, spans = request.assemble((), [fact, text], question)
        return Prompt.answered_by(ids, Evidence(f" {number}", spans[0]))

    return request.prompts(make_prompt)
''',
    },
}
METHOD = {
    "profiling/evaluation/method_table.py": {
        "class Parts(NamedTuple)": """@method("wide", "a window for all heads", "nobody")
def _wide(methods: Methods, length: int, tailed: bool) -> Method:
    return methods.single("a_shape", lambda n: {"sink": 1, "window": n}, length, tailed)


""",
    },
}
CACHE = {
    "profiling/evaluation/cache_table.py": {
        '@policy("h2o"': """@policy("ends", "the first token and the last")
def _ends(share: float, length: int) -> Policy:
    return Streaming(sinks=1, window=max(1, round(share * length)))


""",
    },
}
PICTURE = {
    "profiling/pictures/sizes.py": {
        "": '''"""Layers and heads as numbers."""

from profiling.pictures.drawing import new_figure
from profiling.pictures.registry import Drawing, picture


@picture(of="artifact")
def sizes(source):
    """Draw nothing."""
    model = source.artifact.model
    figure = new_figure(2, 2)
    yield Drawing(
        name="sizes", figure=figure, header=("layers",), rows=[(model.num_layers,)]
    )
''',
    },
}
FORMAT = {
    "artifacts/interop/lines.py": {
        "": '''"""A line for each layer."""

from artifacts.interop.format import Format
from artifacts.interop.report import Export


def read(source, options):
    raise NotImplementedError


def write(artifact, arrays, out):
    raise NotImplementedError


FORMAT = Format(name="lines", about="a line a layer", read=read, write=write, files=("*.lines",))
''',
    },
}
# By walk, a script that finds what it added.
USES = {
    "task": (
        TASK,
        """
from profiling.prompts.prompt import KINDS, make_prompts, parse_task
from tests.profiling.tokenizers import byte_level
(prompt,) = make_prompts(parse_task("echo"), byte_level(), length=600, samples=1, seed=1)
assert len(prompt.input_ids) == 600 and prompt.answer and KINDS["echo"].asks == "a word"
""",
    ),
    "method": (
        METHOD,
        """
from profiling.evaluation.method_table import METHODS, markdown_table, says
assert "wide" in METHODS and says("wide-tail")[1] == "nobody"
assert "| `wide` | a window for all heads | nobody |" in markdown_table()
from profiling.evaluation.config import Config
assert "wide" in str(Config.model_fields["methods"])
""",
    ),
    "cache": (
        CACHE,
        """
from profiling.evaluation.method_table import check_name, method_names, parts_of
assert "dense+ends" in method_names(None)
check_name("dense+ends", method_names(None))
assert parts_of("headwise+ends").spec.policy(0.5, 100).window == 50
""",
    ),
    "picture": (
        PICTURE,
        """
from profiling.pictures.registry import pictures
assert "sizes" in pictures("artifact") and "sizes" not in pictures("model")
""",
    ),
    "format": (
        FORMAT,
        """
from pathlib import Path
from artifacts.interop.formats import FORMATS, guess
from artifacts.schema.fields import Imported
assert guess(Path("a.lines")) == "lines" and FORMATS["lines"].about == "a line a layer"
Imported(format="lines", file="a.lines", sha256="0" * 64)
""",
    ),
}


@pytest.mark.parametrize("entry", USES)
def test_new_entry_needs_one_file(entry, tmp_path):
    walk, script = USES[entry]
    assert len(walk) == 1
    for package in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so"))
    add(tmp_path, walk)
    (tmp_path / "use.py").write_text(script)
    # A script's folder comes before installed packages.
    done = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
