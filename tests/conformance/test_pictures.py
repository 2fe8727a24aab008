"""Conformance of pictures: every picture of the registry goes through every test here."""

from __future__ import annotations

import csv

import pytest

import artifacts
from artifacts import Decode, OmniKV
from artifacts.schema.search import FrontierPoint
from profiling.models.loading import load_model
from profiling.pictures.registry import Source, pictures
from tests.profiling.conftest import folder, searched, sketched
from tests.profiling.pictures import random_profile, texts_outside
from tests.typed import make_prompts

__all__ = ["folder", "searched", "sketched"]

PICTURES = pictures("artifact", "model", "profile")
# The pictures of each source. A new picture of a source needs nothing here.
ORIGINS = {picture.of for picture in PICTURES.values()}


@pytest.fixture(scope="module")
def sources(searched) -> dict[str, Source]:
    """A source of each kind."""
    model, config = str(searched / "tiny"), searched / "cfg.yaml"
    loaded = load_model(model, dtype="float32")
    prompt = make_prompts("passkey", loaded.tokenizer, length=300, samples=1, seed=0)[0]
    artifact, arrays = artifacts.load_pair(config)
    points = [{"spent": 0.2, "lost": 0.08, "measured": False}]
    points.append({"spent": 0.4, "lost": 0.01, "lost_high": 0.03, "measured": True})
    timed = [FrontierPoint(seconds=10 * point["spent"], **point) for point in points]
    search = artifact.search.model_copy(update={"frontier": tuple(timed), "spent": 0.4})
    artifact = artifact.model_copy(update={"search": search})
    decode = Decode(omnikv=OmniKV(filter_layers=(1, 4), budget=9))
    return {
        "artifact": Source(command="headwise plot", artifact=artifact, arrays=arrays, head=(1, 2)),
        "model": Source(
            command="headwise heatmaps",
            artifact=artifact,
            loaded=loaded,
            prompt=prompt,
            prompt_name="passkey",
            head=(1, 2),
        ),
        "profile": Source(
            command="headwise heatmaps",
            artifact=artifact.model_copy(update={"decode": decode}),
            profile=random_profile(12, sliding=True),
        ),
    }


def test_pictures_every_origin_has_a_source(sources):
    assert set(sources) == ORIGINS


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_three_files_with_its_numbers(name, sources, tmp_path):
    picture = PICTURES[name]
    assert picture.draw.__doc__
    drawings = list(picture.draw(sources[picture.of]))
    assert drawings and drawings[0].name.partition(".")[0] == name
    assert len({drawing.name for drawing in drawings}) == len(drawings)
    for drawing in drawings:
        assert texts_outside(drawing.figure) == []
        paths = drawing.write(tmp_path / drawing.name)
        assert paths == [tmp_path / f"{drawing.name}.{kind}" for kind in ("png", "svg", "csv")]
        assert all(path.is_file() for path in paths)
        with paths[2].open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == list(drawing.header) and rows
        assert {len(row) for row in rows} == {len(header)}
