"""Write the tables of the pages from docs/results/*.json.

    python benchmarks/tables.py            # writes them between the markers of the pages
    python benchmarks/tables.py --check    # names the pages whose tables differ; exit status 3

A page has a table where it has the lines `<!-- table: NAME -->` and `<!-- end of table -->`.
result_tables/ has a function for each name. README.md and all pages of docs/ are searched.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from result_tables.table import TABLES, Results

ROOT = Path(__file__).resolve().parents[1]
for _path in sorted((Path(__file__).parent / "result_tables").glob("*.py")):
    import_module(f"result_tables.{_path.stem}")
MARKED = re.compile(r"<!-- table: ([^\n]+) -->\n.*?<!-- end of table -->", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_tables(page: str, results: Results, folder: str = "results/") -> str:
    """Return a page with its tables as the result files have them.

    Args:
        page: the text.
        results: the files.
        folder: where they are, seen from the page.

    Raises:
        ValueError: a marker names no table.
    """

    def built(marked: re.Match[str]) -> str:
        name = marked[1]
        if name not in TABLES:
            raise ValueError(f"no table {name}: {', '.join(sorted(TABLES))}")
        rows = TABLES[name](results).replace("](results/", f"]({folder}")
        return f"<!-- table: {name} -->\n\n{rows}\n<!-- end of table -->"

    return MARKED.sub(built, page)


def folder_of(page: Path) -> str:
    """Return where the result files are, seen from a page."""
    return "docs/results/" if page.parent == ROOT else "results/"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or check them; 3 if a page has other ones."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--check", action="store_true", help="write nothing")
    options = p.parse_args(argv)
    results = Results()
    different = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = with_tables(text, results, folder_of(page))
        if new != text:
            different.append(page)
            if not options.check:
                page.write_text(new, encoding="utf-8")
    for page in different:
        state = "differs from docs/results" if options.check else "written"
        print(f"{page.relative_to(ROOT)}: {state}")
    return 3 if options.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
