"""The pages: every link leads somewhere, every page is in the site's navigation, and README keeps
to its length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("results/*.md")])


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


# What `make docs` copies beside the pages of docs/.
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BESIDE = re.findall(r"^\tcp -r (notebooks .+) build/docs$", MAKEFILE, re.MULTILINE)[0].split()


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Where a page's links and pictures lead."""
    return re.findall(r"!?\[[^\]]*\]\(\s*([^()\s]+)\s*\)", text_of(page))


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by, as GitHub and Python-Markdown make it."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"\s+", "-", words))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        there = (page.parent / unquote(path)).resolve() if path else page
        if not there.exists() or (
            there.suffix == ".md" and anchor and anchor not in anchors(there)
        ):
            wrong.append(link)
    assert not wrong


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    code = "```\n# no heading [x](y.md)\n```"
    page.write_text(f"# A `b` heading\n\n[one](none.md) [two](#a-b-heading)\n\n{code}\n")
    assert links(page) == ["none.md", "#a-b-heading"] and anchors(page) == {"a-b-heading"}


def entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from entries(value) if isinstance(value, list) else [value]


def test_every_page_of_the_site_is_there_and_every_page_is_in_the_site():
    listed = list(entries(SITE["nav"]))
    assert len(listed) == len(set(listed))
    places = {name: (ROOT if name.partition("/")[0] in BESIDE else DOCS) / name for name in listed}
    assert [name for name, path in places.items() if not path.is_file()] == []
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents}
    pages |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert pages == set(listed) - set(BESIDE)


def test_the_site_fetches_nothing():
    assert SITE["theme"]["font"] is False and "search" in SITE["plugins"]
    for drawing in DOCS.glob("drawings/*.svg"):
        assert "http" not in drawing.read_text().replace("http://www.w3.org/2000/svg", "")


def test_readme_fits_a_glance():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_the_version_is_one():
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project is not None and cited["version"] == project[1]


def test_results_fit_and_name_their_files():
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 350
    files = list(DOCS.glob("results/*.json"))
    named = set(re.findall(r"\(results/([\w.]+)\)", text))
    assert named == {path.name for path in files}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 300 for path in files)
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 120
