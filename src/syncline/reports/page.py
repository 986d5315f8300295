"""HTML pages of one file, readable without a server: of a program, and of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from syncline.program.display.text import listing, summary_lines, title, to_text
from syncline.program.program import Program
from syncline.reports.drawing import KINDS, Drawing, shown_ranks, simulated_drawing

Card = tuple[str, str]
"""A figure, and what it is."""


def program_page(program: Program, configuration: str) -> str:
    """The page for `program`, which follows from `configuration`, a YAML text."""
    return page(
        "Syncline: one step",
        f"One optimizer step: {to_text(program, ()).splitlines()[0]}",
        [
            *drawings([simulated_drawing(program)]),
            *texts(program, configuration),
        ],
    )


def page(name: str, heading: str, content: Iterable[str]) -> str:
    """A whole document; `content` is HTML."""
    style, script = (files(__package__).joinpath(file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(name)}</title>\n<style>\n{style}</style></head><body>",
            f"<h1>{escape(heading)}</h1>",
            *content,
            f'<div id="tip" hidden></div>\n<script>\n{script}</script>\n</body></html>\n',
        ]
    )


def cards(figures: Sequence[Card]) -> str:
    shown = "".join(
        f'<div class="card"><b>{escape(figure)}</b><span>{escape(what)}</span></div>' for figure, what in figures
    )
    return f'<div class="cards">{shown}</div>'


def drawings(shown: Sequence[Drawing]) -> Iterator[str]:
    """The drawings, beside each other where there is room, and their legend. Once a page: they bring their data."""
    colours = [(kind, "-".join(kind.replace(",", "").split())) for kind in KINDS]
    yield (
        '<div class="legend">'
        + "".join(f'<span style="--colour: var(--{colour})">{escape(kind)}</span>' for kind, colour in colours)
        + "</div>"
    )
    yield (
        '<p class="quiet">A row is a rank: its actions; below them what happens inside them, reductions under way, the '
        "life of buckets, and the bytes of gradients. Drag to look closer, point at something to read what it is.</p>"
    )
    yield '<div class="drawings">'
    for index, drawing in enumerate(shown):
        yield (
            f'<figure id="drawing-{index}"><figcaption><b>{escape(drawing.title)}</b>'
            '<button type="button">All</button></figcaption>'
            f'<canvas role="img" aria-label="{escape(drawing.title)}"></canvas>'
            f'<p class="quiet">{escape(drawing.note)}</p></figure>'
        )
    yield "</div>"
    data = json.dumps({"kinds": list(KINDS), "drawings": [drawing.to_json() for drawing in shown]})
    data = data.replace("</", r"<\/")  # Nothing in it can end the element that it stands in.
    yield f'<script type="application/json" id="drawings">{data}</script>'


def texts(program: Program, configuration: str) -> Iterator[str]:
    """The figures of a program, every action of every place in the pipeline, and the configuration."""
    yield f"<h2>Figures</h2>\n<pre>{escape(chr(10).join(summary_lines(program)))}</pre>"
    listings = "".join(
        f"<pre><b>{escape(title(program, rank))}</b>\n{escape(chr(10).join(listing(program, rank)))}</pre>"
        for rank in shown_ranks(program)
    )
    yield f'<details><summary>Every action</summary><div class="listings">{listings}</div></details>'
    yield f"<details><summary>The configuration</summary><pre>{escape(configuration)}</pre></details>"
