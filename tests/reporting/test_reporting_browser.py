"""The page in a browser without a network: it draws itself, opens places, zooms and moves, and says no error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_parts import planned, told_of, trained

from rlflow_tvm.reporting import page as page_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 240_000.0
"""Of a browser on a machine that is busy."""

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it is in the extra dev")
if CHROMIUM is None:
    pytest.skip("no Chromium here: install the system's package chromium", allow_module_level=True)

NASTY = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium has none for root
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    state = planned()
    return told_of(state, training=trained(state))


class Shown:
    """A page that is open, what it asked for beside its file, and what it complained of."""

    def __init__(self, browser: Any, file: Path, told: dict[str, Any], **options: Any) -> None:
        file.write_text(page_of(told), encoding="utf-8")
        self.context = browser.new_context(offline=True, viewport={"width": 1200, "height": 800}, **options)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(file.as_uri())
        self.page.locator("#parts a").first.wait_for()
        self.until(lambda: self.page.locator(".pane svg[viewBox]").count() == 2)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait; the browser's own way of waiting for an expression would be forbidden by the page's policy."""
        for _ in range(int(PATIENCE_MS / 100)):
            if holds():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError("it did not come true")

    def view(self, number: int = 0) -> list[float]:
        """The part of a whole graph that its pane shows: x, y, width, height."""
        text = self.page.locator(".pane svg").nth(number).get_attribute("viewBox")
        return [float(part) for part in text.split()]


@pytest.fixture
def shown(browser, told, tmp_path) -> Iterator[Shown]:
    opened = Shown(browser, tmp_path / "report.html", told)
    yield opened
    assert opened.complaints == []
    assert opened.asked == [(tmp_path / "report.html").as_uri()]
    opened.context.close()


def colours(picture: bytes) -> int:
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed: it comes with the extra plots")
    return len(np.unique(np.asarray(images.open(BytesIO(picture)).convert("RGB")).reshape(-1, 3), axis=0))


def test_all_parts_are_there(shown, told):
    page = shown.page
    assert page.locator("h1").inner_text() == "zoo:small"
    assert page.locator("#parts a").all_inner_texts() == [
        "Cost along the plan", "Kernels", "Whole graph", "Training", "Applied rules",
    ]  # fmt: skip
    steps = page.locator("#steps button.rule")
    assert [text.strip() for text in steps.all_inner_texts()] == [step["rule"] for step in told["steps"]]
    for number, side in enumerate(("before", "after")):
        table = page.locator("#kernel-tables table").nth(number)
        assert table.locator("tbody tr").count() == len(told["kernels"][side])
        pane = page.locator(".pane svg").nth(number)
        assert pane.locator(".node").count() == len(told["graphs"][side]["nodes"])
        assert pane.locator(".edge").count() == len(told["graphs"][side]["edges"])
    assert page.locator("#training-charts svg").count() == len(told["curves"]) + 1
    assert page.locator(".heat").count() == 2


def test_a_click_on_a_step_opens_its_places(shown, told):
    page = shown.page
    button, places = page.locator("#steps button.rule").first, page.locator("#step-1 .canvas svg")
    assert places.count() == 0
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert places.count() == 2
    assert places.nth(0).is_visible()
    assert places.nth(1).is_visible()
    drawing = told["steps"][0]["drawings"]["before"]
    assert places.nth(0).locator(".node").count() == len(drawing["nodes"])
    assert places.nth(0).locator(".matched").count() == sum(node[7] == "matched" for node in drawing["nodes"]) > 0
    button.click()
    assert not places.nth(0).is_visible()


def test_points_of_the_chart_open_steps_by_key_and_click(shown):
    page = shown.page
    points = page.locator("#cost-chart .pick")
    points.nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator("#step-2").is_visible()
    points.nth(0).click()
    assert page.locator("#step-1").is_visible()


def test_whole_graph_zooms_and_moves(shown):
    page = shown.page
    pane = page.locator(".pane svg").first
    pane.scroll_into_view_if_needed()
    box = pane.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    first = shown.view()
    page.get_by_role("button", name="Zoom in").first.click()
    nearer = shown.view()
    assert nearer[2] < first[2]
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 80, y + 30, steps=4)
    page.mouse.up()
    moved = shown.view()
    assert moved[0] < nearer[0]
    assert moved[1] < nearer[1]
    assert moved[2:] == pytest.approx(nearer[2:])
    page.mouse.wheel(0, -300)  # the pane has the focus now
    shown.until(lambda: shown.view()[2] < moved[2])
    page.keyboard.press("0")
    assert shown.view()[2] > moved[2]


def test_changes_are_found_and_nodes_told(shown, told):
    page = shown.page
    page.get_by_role("button", name="Next change").last.click()
    text = page.locator(".told").last.inner_text()
    changed = [node[8] for node in told["graphs"]["after"]["nodes"] if node[7]]
    assert text in changed
    assert page.locator(".pane").last.locator(".node.chosen").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_picture_is_not_blank(browser, told, tmp_path, scheme):
    opened = Shown(browser, tmp_path / "report.html", told, color_scheme=scheme)
    picture = opened.page.screenshot(timeout=PATIENCE_MS)
    assert colours(picture) > 20
    paper = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[scheme]
    assert opened.complaints == []
    opened.context.close()


def test_narrow_screens_need_no_scrolling_aside(browser, told, tmp_path):
    opened = Shown(browser, tmp_path / "report.html", told)
    opened.page.set_viewport_size({"width": 420, "height": 800})
    width = opened.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 420
    opened.context.close()


def test_parts_without_data_are_not_there(browser, tmp_path):
    opened = Shown(browser, tmp_path / "report.html", told_of(planned(count=0)))
    assert opened.page.locator("#training").count() == 0
    assert opened.page.locator("#rules").count() == 0
    assert "empty" in opened.page.locator("#cost-note").inner_text()
    assert opened.complaints == []
    opened.context.close()


def test_texts_of_files_run_nothing(browser, told, tmp_path):
    steps = [{**step, "rule": NASTY, "equation": NASTY, "when": [NASTY]} for step in told["steps"]]
    nodes = [[*node[:4], NASTY, NASTY, *node[6:8], NASTY] for node in told["graphs"]["after"]["nodes"]]
    graphs = {**told["graphs"], "after": {**told["graphs"]["after"], "nodes": nodes}}
    nasty = {
        **told,
        "model": NASTY,
        "steps": steps,
        "graphs": graphs,
        "curves": [{"name": NASTY, "points": [[0, 1], [1, 2]]}],
        "rules": {"columns": [NASTY], "rows": [{"rule": NASTY, "counts": [1]}]},
    }
    opened = Shown(browser, tmp_path / "report.html", nasty)
    opened.page.locator("#steps button.rule").first.click()
    assert opened.page.evaluate("window.broken") is None
    assert opened.page.locator("h1").inner_text() == NASTY
    assert opened.page.locator("img").count() == 0
    assert opened.complaints == []
    opened.context.close()
