"""What pages are made of: their style, for bright and dark screens, tables, and numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2024;--muted:#5b6570;--rule:#d8dde3;--soft:#f2f5f8;--band:#dce6f2;
--good:#00714f;--bad:#b3400a;--c0:#0072b2;--c1:#c24d00;--c2:#00795a;--c3:#a8467c;--c4:#8a6100;--c5:#6a4fb8;--c6:#333}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e7eaee;--muted:#9aa5b1;--rule:#343b44;--soft:#1e2329;
--band:#26384d;--good:#4cc79f;--bad:#ff9d66;--c0:#5ab4ef;--c1:#ff9350;--c2:#45c99e;--c3:#e79bc6;--c4:#e5b544;
--c5:#b7a0f2;--c6:#d5d9de}}
body{margin:0 auto;padding:1.5rem clamp(1rem,4vw,3rem) 4rem;max-width:76rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.25rem;margin:2.4rem 0 .4rem}
h3{font-size:1rem;margin:1.4rem 0 .3rem}p,ul{max-width:46rem}.muted,.tick,caption{color:var(--muted);fill:var(--muted)}
code{background:var(--soft);padding:.1em .3em;border-radius:3px;overflow-wrap:anywhere}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding-bottom:.3rem}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--rule);
white-space:nowrap}th{font-weight:600;vertical-align:bottom}thead th{white-space:normal;min-width:4.5rem}
th:first-child,td.text{text-align:left}
th:first-child,td:first-child{position:sticky;left:0;background:var(--paper)}
tbody tr:hover td{background:var(--soft)}td small{display:block;color:var(--muted)}
td.better{color:var(--good);font-weight:600}td.worse{color:var(--bad);font-weight:600}
.chart{max-width:100%;height:auto;display:block;font:13px system-ui,sans-serif;fill:var(--ink)}.tick{font-size:12px}
.grid{stroke:var(--rule)}.band{fill:var(--band)}.bar line{stroke:var(--muted);stroke-width:3}.bar circle{fill:var(--c0)}
.bar.better circle{fill:var(--good)}.bar.worse circle{fill:var(--bad)}
.line polyline{fill:none;stroke-width:2.2;stroke:var(--s)}.line circle{fill:var(--s)}
.s0{--s:var(--c0)}.s1{--s:var(--c1)}.s2{--s:var(--c2)}.s3{--s:var(--c3)}.s4{--s:var(--c4)}.s5{--s:var(--c5)}
.s6{--s:var(--c6)}.d1 polyline{stroke-dasharray:8 4}.d2 polyline{stroke-dasharray:2 3}
.d3 polyline{stroke-dasharray:9 3 2 3}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.875rem}
.maps{display:flex;flex-wrap:wrap;gap:1rem 1.6rem}.maps figure{margin:0;max-width:100%}
figure{margin:0}figcaption{font-size:.875rem;color:var(--muted)}
details{margin:1rem 0}summary{cursor:pointer;font-weight:600}
"""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def table(head: Sequence[str], rows: Iterable[Sequence[tuple[str, str]]], caption: str) -> str:
    """A table of cells, each a class of STYLE (or "") and HTML; `head` is HTML, `caption` is text."""
    top = "".join(f"<th scope=col>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{cell}</td>' if kind else f"<td>{cell}</td>" for kind, cell in row)
        + "</tr>"
        for row in rows
    )
    return (
        f"<div class=scroll><table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def number(value: float | None) -> str:
    """A figure with the digits that matter; a stroke where there is none."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def plain(value: Any) -> str:
    """A setting as text."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def size(value: int) -> str:
    """Bytes as people write them."""
    for unit, name in _UNITS:
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value} B"
