"""The documentation as a whole: the site builds, no page is left out, links lead somewhere, every snippet is run."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import halfmesh
from docs_tools.public_names import public_places

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md"))]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_the_site_is_built(tmp_path):
    pytest.importorskip("material", reason="pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    home = (tmp_path / "site" / "index.html").read_text()
    assert "Start in five minutes" in home
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page.read_text())
        assert [address for address in loaded if "example" not in address] == [], f"{page} loads from elsewhere"
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("Engine.backward", "Engine.save", "Trainer.fit", "Registry.register", "Engine.loss_scale"):
        assert name in api, name


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w./-]+\.md)$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    missing = {path.relative_to(ROOT / "docs").as_posix() for path in DOCS} - set(listed)
    assert not missing, f"put these into nav of mkdocs.yml: {sorted(missing)}"


def test_nothing_is_fetched_while_the_site_is_built():
    class Loader(yaml.SafeLoader):
        """Knows mkdocs' own tags."""

    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    assert config["theme"]["font"] is False
    assert [plugin if isinstance(plugin, str) else next(iter(plugin)) for plugin in config["plugins"]] == [
        *("search", "mkdocstrings"),
    ]


def anchors(text):
    """What headings can be linked by."""
    found = set()
    for heading in re.findall(r"^#+ (.*?)$", FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text()))
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = Path(posixpath.normpath(page.parent / path)) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def test_links_of_the_site():
    pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
    from docs_tools.site_links import rewrite

    known = {"loop.md", "assets/inside.svg", "repository/CONTRIBUTING.md", "repository/benchmarks/RESULTS.md"}
    for page, given, expected in [
        ("speed.md", "[tables](../benchmarks/RESULTS.md#goals)", "[tables](repository/benchmarks/RESULTS.md#goals)"),
        ("a/b.md", "see [the loop](../loop.md)", "see [the loop](../loop.md)"),
        (
            "repository/README.md",
            "[loop](docs/loop.md#x), [c](CONTRIBUTING.md)",
            "[loop](../loop.md#x), [c](CONTRIBUTING.md)",
        ),
        ("repository/README.md", "in [gpt.py](examples/gpt.py)", "in gpt.py"),
        ("inside.md", "![rooms](assets/inside.svg)", "![rooms](assets/inside.svg)"),
        ("inside.md", "`[a](b.md)` and [h](https://x.org)", "`[a](b.md)` and [h](https://x.org)"),
        ("inside.md", "```\n[a](../b.md)\n```", "```\n[a](../b.md)\n```"),
        ("inside.md", "[lost](lost.md)", "[lost](lost.md)"),  # left for mkdocs, which complains
    ]:
        assert rewrite(given, page, known) == expected, given


def test_lists_and_tables_of_the_site():
    pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
    from docs_tools.site_links import separate

    given = "Good to know:\n- one\n  more\n- two\n\nA table:\n| a |\n|---|\n```\ncode\n- no list\n```\n- three"
    assert separate(given) == (
        "Good to know:\n\n- one\n  more\n- two\n\nA table:\n\n| a |\n|---|\n```\ncode\n- no list\n```\n\n- three"
    )
    assert separate("- one\n\n| a |\n") == "- one\n\n| a |\n"


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"^::: halfmesh\.([\w.]+)$", page, re.MULTILINE))
    for package in ("halfmesh", "halfmesh.hooks"):
        for name, place in public_places(package).items():
            reference = f"{place.module.removeprefix('halfmesh.')}.{name}"
            assert reference in documented or f"| `{name}` |" in page, (
                f"::: halfmesh.{reference} is missing in docs/api.md"
            )


def test_the_table_of_registries():
    for name, kind, group in re.findall(
        r"^\| `(\w+)` \| (.*?) \| `(.*?)` \|$", (ROOT / "docs" / "api.md").read_text(), re.M
    ):
        assert getattr(halfmesh, name).entry_point_group == group, kind


TESTS = {
    path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path.name != Path(__file__).name
}


def readers_of(page):
    """Tests that read a page of docs/: they name it, or the folder within docs/ where it is."""
    name = page.relative_to(ROOT / "docs")
    named = [f'"{page.name}"', f'"{name.as_posix()}"', *(f'"docs" / "{part}"' for part in name.parts[:-1])]
    return [text for text in TESTS.values() if any(part in text for part in named)]


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_every_snippet_is_run_by_a_test(page):
    """A block of Python begins with `# name.py`, and a test that reads the page asks for it by that name."""
    name = page.relative_to(ROOT / "docs").as_posix()
    readers = readers_of(page)
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        first = block.partition("\n")[0]
        assert re.match(r"# [\w./]+\.py", first), f"{name}: a snippet begins with {first!r}, not with a name"
        asked = f'"{first.removeprefix("# ")}"'
        assert any(asked in text for text in readers), f"{name}: no test runs the snippet {asked}"


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_what_is_shown_of_the_command_line_is_tried(page):
    """A test that reads the page compares its console blocks."""
    text = page.read_text()
    if "```console" in text:
        assert any('"console"' in source or "```console" in source for source in readers_of(page)), page.name
