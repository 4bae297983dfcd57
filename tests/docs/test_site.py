"""The documentation as a whole: links lead somewhere, every snippet is run, every public name is documented."""

from __future__ import annotations

import ast
import difflib
import json
import posixpath
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docs_tools import promises, public_names
from tests.support.pages import DOCS, ROOT, find_blocks

PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def name_of(path):
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


@pytest.mark.slow
def test_the_site_is_built(tmp_path):
    pytest.importorskip("material", reason="pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install '.[docs]'")
    from docs_tools.site_links import BOOSTS, WORDS

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    assert not [entry["location"] for entry in entries if entry["location"].startswith("repository/")]
    assert {page for page in (*BOOSTS, *WORDS) if not (DOCS / page).exists()} == set()


def test_a_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version {version}, " in (ROOT / "README.md").read_text()


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w./-]+\.md)$", nav, re.MULTILINE)
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} <= set(listed), "nav of mkdocs.yml"


def anchors(text):
    found = set()
    for heading in re.findall(r"^#+ (.*?)$", FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip()))
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "RESULTS.md"], ids=name_of)
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


def test_files_and_commands_that_pages_name_exist():
    new = {"halfmesh/amp/pure_amp.py", "amp/pure_amp.py"}  # a plugin that CONTRIBUTING names
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES[:-1]:
        text = page.read_text()
        rooms = "halfmesh|" + "|".join(path.name for path in (ROOT / "halfmesh").iterdir() if path.is_dir())
        rooms += "|tests|benchmarks|configs|examples"  # amp/: within halfmesh/ or tests/
        named = set(re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w/]+\.(?!md\b)\w+)", text)) - new
        exists = {name for name in named for within in (".", "halfmesh", "tests") if (ROOT / within / name).exists()}
        assert named - exists == set(), page
        assert set(re.findall(r"`make ([a-z-]+)(?: [A-Z]+=\w+)?`", text)) <= targets, page


def snippets_that_tests_ask_for():
    """(page, snippet) of every call in tests/docs/ that writes both out: `snippet("loop.md", "train.py")`."""
    found = set()
    for path in (ROOT / "tests" / "docs").glob("test_*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
        for call in calls:
            page, *names = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)] or [None]
            if isinstance(call.args[0], ast.Constant):
                found |= {(page, name) for name in names if str(name).endswith(".py")}
    return found


def test_every_snippet_is_run():
    """A block of Python begins with `# name.py`, and a test asks for it by that name."""
    asked, shown = snippets_that_tests_ask_for(), set()
    for page in PAGES:
        for block in find_blocks(page.read_text(), "python"):
            name = re.match(r"# ([\w./]+\.py)\b|# mistake\n", block)
            assert name, f"{page}: a snippet begins with {block[:40]!r}, not with a name"
            shown |= {(name_of(page), name[1])} if name[1] else set()
    assert len(shown) > 70
    assert sorted(shown - asked) == []
    assert sorted(pair for pair in asked - shown if str(pair[0]).endswith(".md")) == []


def test_every_public_name_is_in_the_reference():
    page = "\n".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
    documented = set(re.findall(r"^::: halfmesh\.([\w.]+)$", page, re.MULTILINE))
    for package in ("halfmesh", "halfmesh.hooks", "halfmesh.nn"):
        for name, place in public_names.public_places(package).items():
            reference = f"{place.module.removeprefix('halfmesh.')}.{name}"
            assert reference in documented or f"| `{name}` |" in page, f"::: halfmesh.{reference} is missing"


def test_public_names_and_their_signatures_are_frozen():
    frozen, now = public_names.FROZEN.read_text().splitlines(), public_names.render().splitlines()
    difference = "\n".join(difflib.unified_diff(frozen, now, "frozen", "now", "", "", 1, ""))
    assert not difference, f"{difference}\n\nIf that is what you want: python -m docs_tools.public_names"


def test_the_page_of_promises_is_what_the_marks_say():
    assert promises.PAGE.read_text() == promises.render(), "make promises"
    assert [promise.what for promise in promises.read_promises() if not (DOCS / promise.page).is_file()] == []


def test_tests_that_pages_name_exist():
    for page in PAGES[:-1]:
        text = page.read_text()
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
        assert [f"{path}::{name}" for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()] == []
        assert [path for path in re.findall(r"`(tests/[\w/.]+)`", text) if not (ROOT / path).exists()] == []
