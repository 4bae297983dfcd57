"""The page in a browser: nothing overflows, overlaps or is clipped, narrow and wide; it asks for no other file."""

import shutil

import pytest

import halfmesh
from tests.report.report_runs import make_config, make_plan, make_records, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium, chromium-browser or google-chrome"),
]

LAYOUT = """() => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  const boxes = (root, query) => [...root.querySelectorAll(query)].filter((e) => e.getClientRects().length)
    .map((e) => [e.textContent.trim(), e.getBoundingClientRect()]);
  const apart = (a, b) => a.right < b.left + 0.5 || a.bottom < b.top + 0.5;
  const meet = (a, b) => !apart(a, b) && !apart(b, a);
  const out = (a, b) => a.left < b.left - 0.5 || a.right > b.right + 0.5 || a.top < b.top - 0.5
    || a.bottom > b.bottom + 0.5;
  const problems = [];
  const shown = [...document.querySelectorAll("svg.mesh")].filter((svg) => svg.getClientRects().length);
  for (const svg of shown) {
    const name = svg.closest("section").id, frame = svg.getBoundingClientRect(), words = boxes(svg, "text");
    for (const [word, box] of words) if (out(box, frame)) problems.push(`${name}: ${word} is clipped`);
    for (let i = 0; i < words.length; i++) for (let j = 0; j < i; j++)
      if (meet(words[i][1], words[j][1])) problems.push(`${name}: ${words[i][0]} meets ${words[j][0]}`);
  }
  for (const card of document.querySelectorAll("section")) {
    const frame = card.getBoundingClientRect(), parts = "h2, h3, li, p, summary, .scroll, canvas, .u-legend td";
    for (const [word, box] of boxes(card, parts)) if (out(box, frame)) problems.push(`${card.id}: ${word} leaves it`);
  }
  return { problems, charts: document.querySelectorAll("figure canvas").length };
}"""


def make_runs(folder):
    """Runs with names, values and meshes that need room."""
    long = "a_run_with_a_name_" + "that_is_long_" * 5
    plain = write_run(folder / "one")
    records = [{**r, "lr": r.get("lr", 0.0) * 1e-6, "eval_top5_accuracy": r["step"] / 400} for r in make_records()]
    config = make_config(config={"NAMES": ["x" * 300], "K" * 200: 1}, argv=["/a/path/" + "deep/" * 60], device="y" * 99)
    other = write_run(folder / long, config, make_plan(pp=9, dp=3, tp=4, size=70_000_000_000), records)
    cut = write_run(folder / "cut", {}, {"plans": []}, [{"step": 1_350_000, "loss": 1.0, "skipped": [3]}], None)
    return [plain, other, cut, cut, plain]


def test_the_layout(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    url = halfmesh.write_report(*make_runs(tmp_path), out=tmp_path / "report.html").as_uri()
    complaints, asked = [], []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for width, scheme, columns in ((360, "dark", 1), (1400, "light", 2)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(url)
            assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
            assert page.evaluate(LAYOUT) == {"problems": [], "charts": 7}
            style = "getComputedStyle(document.querySelector('main')).gridTemplateColumns.split(' ').length"
            assert page.evaluate(style) == columns
        browser.close()
    assert complaints == []
    assert [name for name in asked if not name.startswith("data:")] == [url] * 2
