"""The page in a browser: nothing overflows, overlaps or is clipped, narrow and wide; it asks for no other file."""

from __future__ import annotations

import json
import shutil

import pytest

import halfmesh
from tests.support.report_runs import make_config, make_plan, make_records, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium, chromium-browser or google-chrome")

SECTIONS = ["summary", "plan", "loss", "lr", "loss_scale", "grad_norm", "throughput", "memory", "skips", "mesh"]
SECTIONS += ["precision", "config"]
LAYOUT = """() => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  const boxes = (root, query) => [...root.querySelectorAll(query)].filter((e) => e.getClientRects().length)
    .map((e) => [e.textContent.trim(), e.getBoundingClientRect()]);
  const apart = (a, b) => a.right < b.left + 0.5 || a.bottom < b.top + 0.5;
  const meet = (a, b) => !apart(a, b) && !apart(b, a);
  const out = (a, b) => a.left < b.left - 0.5 || a.right > b.right + 0.5 || a.top < b.top - 0.5
    || a.bottom > b.bottom + 0.5;
  const problems = [];
  const shown = [...document.querySelectorAll("svg.chart, svg.mesh")].filter((svg) => svg.getClientRects().length);
  for (const svg of shown) {
    const name = svg.closest("section").id, frame = svg.getBoundingClientRect(), words = boxes(svg, "text");
    for (const [word, box] of words) if (out(box, frame)) problems.push(`${name}: ${word} is clipped`);
    for (let i = 0; i < words.length; i++) for (let j = 0; j < i; j++)
      if (meet(words[i][1], words[j][1])) problems.push(`${name}: ${words[i][0]} meets ${words[j][0]}`);
    if (svg.classList.contains("chart")) {
      const scale = frame.width / svg.viewBox.baseVal.width;
      const lines = boxes(svg, ".line, .dot, .skip, .level").map((found) => found[1]);
      const [left, right] = [svg.dataset.left, svg.dataset.right].map((x) => frame.left + x * scale);
      for (const box of lines) if (box.left < left - 5 || box.right > right + 5 || out(box, frame))
        problems.push(`${name}: a line leaves the plot`);
      for (const [word, box] of words) for (const line of [...svg.querySelectorAll(".grid")]) {
        const at = line.getBoundingClientRect();
        if (meet(box, { left: at.left, right: at.right, top: at.top - 1, bottom: at.bottom + 1 }))
          problems.push(`${name}: ${word} is in the plot`);
      }
    }
  }
  for (const card of document.querySelectorAll("section")) {
    const frame = card.getBoundingClientRect();
    for (const [word, box] of boxes(card, "h2, h3, li, td, th, p, summary"))
      if (out(box, frame) && !card.querySelector(".scroll")) problems.push(`${card.id}: ${word} leaves its card`);
  }
  return { problems, charts: shown.filter((svg) => svg.classList.contains("chart")).length };
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open a report of runs, at a width; fails if the page asks for anything, or complains."""
    said, asked, pages = [], [], []

    def go(runs, width, **options):
        path = halfmesh.write_report(*runs, out=tmp_path / "report.html")
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield go
    for page in pages:
        page.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in asked) == len(pages)


@pytest.fixture
def folders(tmp_path):
    """Runs with names, values and meshes that need room."""
    long = "a_run_with_a_name_" + "that_is_long_" * 5
    plain = write_run(tmp_path / "one")
    records = [{**r, "lr": r.get("lr", 0.0) * 1e-6, "eval_top5_accuracy": r["step"] / 400} for r in make_records()]
    config = make_config(config={"NAMES": ["x" * 300], "K" * 200: 1}, argv=["/a/path/" + "deep/" * 60], device="y" * 99)
    other = write_run(tmp_path / long, config, make_plan(pp=9, dp=3, tp=4, size=70_000_000_000), records)
    cut = write_run(tmp_path / "cut", {}, {"plans": []}, [{"step": 1_350_000, "loss": 1.0, "skipped": [3]}], None)
    return {
        "one": [plain],
        "two": [plain, other],
        "long": [other],
        "cut": [cut],
        "five": [plain, other, cut, cut, plain],
    }


@pytest.mark.parametrize(
    ("which", "width"),
    [*((which, width) for which in ("one", "two", "long", "cut", "five") for width in (360, 1400)), ("two", 768)],
)
def test_the_layout(visit, folders, which, width):
    page = visit(folders[which], width, color_scheme="dark" if which == "two" else "light")
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    found = page.evaluate(LAYOUT)
    assert found["problems"] == []
    assert found["charts"] >= (1 if which == "cut" else 6)
    assert all(page.locator(f"#{key}").is_visible() for key in SECTIONS)
    columns = page.evaluate("getComputedStyle(document.querySelector('main')).gridTemplateColumns.split(' ').length")
    assert columns == (2 if width == 1400 else 1)


def test_values_under_the_pointer_and_by_keys(visit, folders):
    page = visit(folders["one"], 1400)
    chart = page.locator("#loss_scale svg.chart.wide")
    tip = page.locator("#loss_scale .tip")
    chart.scroll_into_view_if_needed()
    assert tip.is_hidden()
    box = chart.bounding_box()
    left, right = (float(chart.get_attribute(f"data-{name}")) for name in ("left", "right"))
    x = box["x"] + (left + 0.5 * (right - left)) * box["width"] / 600
    page.mouse.move(x, box["y"] + 60)
    assert tip.inner_text().splitlines()[0] == "update 200"
    assert "skipped updates: 200-202" in tip.inner_text()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] - 200)
    assert tip.is_hidden()
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().splitlines()[0] == "update 220"  # on from where the pointer was
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_a_gap_has_no_number(visit, folders):
    page = visit(folders["one"], 360)
    chart = page.locator("#loss svg.chart.narrow")
    chart.focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    assert page.locator("#loss .tip").inner_text().splitlines()[:2] == ["update 200", "train no number"]
    box = page.locator("#loss .tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


def test_values_that_need_a_power_of_ten_and_updates_of_other_lines(visit, tmp_path):
    for name, step, value in (("small", 1, 1.25e-12), ("later", 1000, 3e20)):
        (tmp_path / name).mkdir()
        records = [{"step": step, "lr": value}, {"step": 100_000, "lr": value}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    page = visit([tmp_path / "small", tmp_path / "later"], 1400)
    page.locator("#lr svg.chart.wide").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#lr .tip").inner_text().splitlines() == [
        "update 1",
        "small 1.25e-12",
        "later 3e20 (update 1,000)",
    ]


CONTRAST = """() => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const behind = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor; if (c !== "rgba(0, 0, 0, 0)") return c; } };
  const low = [];
  const see = (query, property, least) => { for (const e of document.querySelectorAll(query)) {
    const found = ratio(light(getComputedStyle(e)[property]), light(behind(e)));
    if (found < least) low.push(`${query} ${found}`); } };
  see("h1, h2, td, th, li, p, .badge, summary", "color", 4.5);
  see("svg.chart text", "fill", 4.5);
  see(".line", "stroke", 3);
  see(".skip, .dot", "fill", 3);
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(visit, folders, scheme):
    """As WCAG 2.1 AA asks: 4.5 for text, 3 for what is drawn."""
    assert visit(folders["five"], 1400, color_scheme=scheme).evaluate(CONTRAST) == []
