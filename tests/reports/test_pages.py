"""The pages, opened from disk in a real browser: they draw, they answer to the mouse, and they need nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from syncline.program.actions import AllocateGradients
from syncline.program.analysis.costs import simulated_time
from syncline.program.display.text import action_json
from syncline.reports.drawing import KINDS, measured_drawing, shown_ranks, simulated_drawing
from syncline.reports.page import program_page
from syncline.reports.run_page import run_page
from syncline.strategy import Sharding, Strategy
from syncline.strategy.topology import Topology
from tests.program.examples import small_program
from tests.records import RECORD

PROGRAM = small_program(
    Strategy(
        topology=Topology(pp=2, sharding=2),
        sharding=Sharding.STAGE2,
        schedule="ZBV",
        virtual_stages=2,
        micro_batches=4,
        release_gradients=True,
    ),
    layers=4,
)
SECONDS = 0.01
"""Of an action in the measured step."""


def measured(step: int) -> dict[int, list[dict[str, Any]]]:
    """A step in which one action comes after the other, on ranks that began a tenth of a second apart."""
    return {
        rank: [
            {
                "step": step,
                "began": 1000.0 + 10 * step + 0.1 * rank,
                "position": position,
                "start": position * SECONDS,
                "end": (position + 1) * SECONDS,
                **action_json(action),
            }
            for position, action in enumerate(actions)
        ]
        for rank, actions in enumerate(PROGRAM.ranks)
    }


def timelines() -> dict[int, list[list[dict[str, Any]]]]:
    """Of three steps."""
    return {rank: [measured(step)[rank] for step in (1, 2, 3)] for rank in range(len(PROGRAM.ranks))}


RECORDS = [RECORD, replace(RECORD, step=2, loss=float("nan"), skipped=True), replace(RECORD, step=3, loss=4.5)]


class TestDrawing:
    def test_computations_are_where_the_simulation_has_them(self):
        drawing = simulated_drawing(PROGRAM)
        names = list(KINDS)
        ends = []
        for row in drawing.rows:
            computed = [span for span in row.spans if names[span[0]].startswith(("forward", "backward"))]
            waited = [span for span in row.spans if names[span[0]] == "bubble"]
            assert all(end - begin == 1.0 for _, begin, end, _, _ in computed)
            # They fill the time without a gap and without an overlap.
            parts = sorted((begin, end) for _, begin, end, _, _ in computed + waited)
            assert [begin for begin, _ in parts] == [0.0, *(end for _, end in parts[:-1])]
            ends.append(parts[-1][1])
        assert set(ends) == {simulated_time(PROGRAM)}

    def test_every_action_is_drawn_once_and_every_allocation_is_a_life(self):
        for drawing in (simulated_drawing(PROGRAM), measured_drawing(PROGRAM, measured(2), 2)):
            for rank, row in zip(shown_ranks(PROGRAM), drawing.rows, strict=True):
                actions = PROGRAM.ranks[rank]
                assert len(row.spans) == len(actions)
                assert len(row.lives) == sum(isinstance(action, AllocateGradients) for action in actions)
                assert all(life.begin <= life.end for life in row.lives)
                assert max(held for _, held in row.memory) == PROGRAM.peak_gradient_bytes[rank]
                assert row.memory[0] == (0.0, 0)
                assert row.memory[-1][1] == 0

    def test_a_measured_step_begins_with_its_first_rank(self):
        drawing = measured_drawing(PROGRAM, measured(2), 2)
        first, second = shown_ranks(PROGRAM)
        begins = [min(span[1] for span in row.spans) for row in drawing.rows]
        assert begins == pytest.approx([0.1 * first, 0.1 * second])


class References(HTMLParser):
    """What a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {value}" for name, value in attributes if name in ("src", "href", "data", "srcset")]


def pages() -> dict[str, str]:
    return {
        "program": program_page(PROGRAM, "seed: 1 # </script><b>not markup</b>\n"),
        "timed run": run_page(PROGRAM, "seed: 1\n", RECORDS, timelines(), {"loss": 4.125}),
        "run": run_page(PROGRAM, "seed: 1\n", RECORDS, {}),
        "run without a step": run_page(PROGRAM, "", [], {}),
    }


@pytest.mark.parametrize("name", pages())
def test_a_page_is_one_file(name):
    text = pages()[name]
    assert References(text).found == []
    assert not re.search(r"@import|url\(|fetch\(|https?://", text)
    data = re.search(r'<script type="application/json" id="drawings">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    document = json.loads(data[1])
    assert document["kinds"] == list(KINDS)
    assert len(document["drawings"]) == (2 if name == "timed run" else 1)


def test_a_run_page_tells_the_figures_of_the_run():
    text = pages()["timed run"]
    for words in ("3 optimizer steps on 4 ranks", "4.5000", "4.1250", "512 MiB", "steps skipped", "Step 3, measured"):
        assert words in text, words
    assert "enable_timer" in pages()["run"]
    assert "enable_timer" not in text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=["light", "dark"])
def opened(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> Iterator[Any]:
    """The page of a timed run, and what the browser complains of."""
    path = tmp_path / "report.html"
    path.write_text(pages()["timed run"], encoding="utf-8")
    page = browser.new_page(viewport={"width": 1500, "height": 1200}, color_scheme=request.param)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda asked: complaints.append(asked.url) if not asked.url.startswith("file:") else None)
    page.goto(path.as_uri())
    yield page
    page.close()
    assert complaints == []


COLOURS = """([index, x, y]) => {
    const canvas = document.querySelector(`#drawing-${index} canvas`), ratio = devicePixelRatio;
    return [...canvas.getContext('2d').getImageData(x * ratio, y * ratio, 1, 1).data].slice(0, 3);
}"""
LABEL, AXIS = 128, 24
"""Where the first action is drawn, as in page.js."""


class TestInABrowser:
    def test_it_draws_the_first_forward_in_its_colour(self, opened):
        colour = opened.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--forward').trim()")
        expected = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        assert opened.evaluate(COLOURS, [0, LABEL + 3, AXIS + 4]) == expected

    def test_pointing_tells_what_it_is(self, opened):
        tip = opened.locator("#tip")
        assert tip.is_hidden()
        opened.hover("#drawing-0 canvas", position={"x": LABEL + 4, "y": AXIS + 8})
        assert tip.inner_text() == "forward 0 of stage 0\n0 forwards to 1 forwards, 1 forwards long"
        opened.hover("#drawing-1 canvas", position={"x": LABEL + 2, "y": AXIS + 8})
        assert tip.inner_text().startswith("count tokens over sharding\n0.00 ms to 10.00 ms")
        opened.hover("h1")
        assert tip.is_hidden()

    def test_dragging_looks_closer_and_a_double_click_shows_all(self, opened):
        canvas = opened.locator("#drawing-0 canvas")
        box = canvas.bounding_box()
        right = box["x"] + box["width"] - 13
        height = box["y"] + AXIS + 8

        def text_at_the_end() -> str:
            opened.mouse.move(right - 3, height)
            return opened.locator("#tip").inner_text()

        before = text_at_the_end()
        opened.mouse.move(box["x"] + LABEL, height)
        opened.mouse.down()
        opened.mouse.move(box["x"] + LABEL + 100, height, steps=3)
        opened.mouse.up()
        closer = text_at_the_end()
        assert closer != before
        assert closer.startswith(("forward", "backward", "bubble", "receive"))
        canvas.dblclick(position={"x": LABEL + 50, "y": AXIS + 8})
        assert text_at_the_end() == before

    def test_dragging_beside_the_drawing_changes_nothing(self, opened):
        tip = opened.locator("#tip")
        box = opened.locator("#drawing-0 canvas").bounding_box()
        opened.mouse.move(box["x"] + 20, box["y"] + AXIS + 8)
        opened.mouse.down()
        opened.mouse.move(box["x"] + 100, box["y"] + AXIS + 8, steps=3)
        opened.mouse.up()
        opened.hover("#drawing-0 canvas", position={"x": LABEL + 4, "y": AXIS + 8})
        assert tip.inner_text() == "forward 0 of stage 0\n0 forwards to 1 forwards, 1 forwards long"

    def test_it_fits_a_narrow_window(self, opened):
        opened.set_viewport_size({"width": 480, "height": 900})
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert opened.locator("#drawing-1 canvas").bounding_box()["width"] <= 480
