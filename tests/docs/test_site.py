"""The documentation as a whole: links lead somewhere, every snippet is run, every public name is documented, and tables
are what the code says: keys with their defaults, names, options."""

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
import typer

import halfmesh
from docs_tools import promises, public_names
from halfmesh import hooks
from halfmesh.cli import app
from halfmesh.config import schema
from halfmesh.config.schema import Settings, parallel_config
from halfmesh.options import Options
from halfmesh.parallel.context.axis import ContextOptions
from halfmesh.parallel.sharding.fsdp import FSDPOptions
from halfmesh.parallel.sharding.zero1 import Zero1Options
from halfmesh.report.run import FILES
from tests.support.pages import DOCS, ROOT, check, defaults, find_blocks, find_rows, read_page, shown_commands

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


def anchors(text):
    headings = re.findall(r"^#+ (.*?)$", FENCE.sub("", text), re.MULTILINE)
    names = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower() for heading in headings]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", name).strip()) for name in names}


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


def test_files_tests_and_commands_that_pages_name_exist():
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
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
        assert [f"{path}::{name}" for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()] == []
        assert [path for path in re.findall(r"`(tests/[\w/.]+)`", text) if not (ROOT / path).exists()] == []


def snippets_that_tests_ask_for():
    """(page, snippet) of every call or tuple in tests/docs/ that writes both out: `snippet("loop.md", "train.py")`."""
    found = set()
    for path in (ROOT / "tests" / "docs").glob("test_*.py"):
        for place in ast.walk(ast.parse(path.read_text())):
            parts = place.args if isinstance(place, ast.Call) else getattr(place, "elts", [])
            if parts and isinstance(parts[0], ast.Constant):
                page, *names = [node.value for node in ast.walk(place) if isinstance(node, ast.Constant)]
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


AMP = halfmesh.AMP_PLUGINS
PARALLEL = parallel_config({"context", "expert"})
SHORT_FORMS = {"parallel.data": "strategy", "clip_grad_norm": "max_norm"}
SHORT_FORMS |= dict.fromkeys(("activation_checkpoint", "compile"), "enabled")
SHORT_FORMS |= {f"parallel.{axis}": "size" for axis in ("tensor", "pipeline", "context", "expert")}
TABLES_OF_DEFAULTS = {  # header: what has these defaults
    "key of parallel.tensor": [schema.TensorConfig()],
    "key of parallel.pipeline": [schema.PipelineConfig()],
    "key of parallel.context": [ContextOptions()],
    "key of parallel.data": [schema.DataConfig(), Zero1Options()],
    "key of parallel.data under fsdp": [FSDPOptions()],
    "key of checkpoint": [schema.CheckpointConfig(directory="*required*")],
}


def default_of(path):
    model, value = Settings, None
    for part in path.split("."):
        value = PARALLEL() if part == "parallel" else model.model_fields[part].get_default()
        model = type(value) if isinstance(value, Options) else model
    return getattr(value, SHORT_FORMS[path]) if path in SHORT_FORMS else value


def test_the_tables_of_config_keys():
    for header, parts in TABLES_OF_DEFAULTS.items():
        expected = {key: default for options in parts for key, default in options.model_dump().items()}
        assert defaults("config.md", header) == expected
    found = defaults("config.md", "key")
    assert {key.partition(".")[0] for key in found} == set(Settings.model_fields)
    within = {f"parallel.{name}" for name in PARALLEL.model_fields}
    assert {key for key in found if key.startswith("parallel.")} == within
    assert found == {key: default_of(key) for key in found}


@pytest.mark.promise("keys of NAIVE and TORCH")
def test_the_table_of_modes():
    rows = find_rows(read_page("config.md"), "mode")
    assert {row[0].strip("`") for row in rows} == set(AMP.names())
    for mode, _, keys in rows:
        assert eval(f"dict({keys.strip('`')})") == AMP.get(mode.strip("`")).options().model_dump(), mode


def test_the_table_of_schedules():
    rows = {row[0].strip("`"): row[1:] for row in find_rows(read_page("pipeline.md"), "schedule | order")}
    assert rows.keys() == set(halfmesh.SCHEDULES.names())
    for name, (_, _, waiting, _) in rows.items():
        for p, m, v in ((2, 4, 2), (4, 8, 3)):
            expected = eval(waiting, {"p": p, "m": m, "v": v})
            chunks = v if "v" in waiting else 1  # zbv waits for nobody, whatever the chunks
            assert halfmesh.SCHEDULES.get(name).bubble(p, chunks, m) == pytest.approx(expected), name


def test_the_tables_of_names():
    attributes = {name for name in vars(halfmesh.StepResult) if not name.startswith("_")}
    for page, header, names in (
        ("tensor-parallel.md", "style", halfmesh.TENSOR_STYLES.names()),
        ("report.md", "file", FILES),
        ("loop.md", "attribute", attributes),
    ):
        rows = find_rows(read_page(page), header)
        assert {name for row in rows for name in re.findall(r"`([\w.]+)", row[0])} == {*names}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", read_page("trainer.md"), re.MULTILINE)
    assert {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)} == set(halfmesh.HOOKS.names())
    assert {name for _, classes in rows for name in re.findall(r"`(\w+)\(", classes)} == set(hooks.__all__)


def option_of(option):
    """Its name, and what the table says of its default."""
    name = option.opts[0] if option.nargs == 1 else f"{option.metavar}..."
    if option.required:
        return name, "required"
    return name, None if option.default is None or option.default is False else f"default `{option.default}`"


def test_the_options_of_each_command():
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", read_page("cli.md"), re.DOTALL | re.MULTILINE))
    commands = typer.main.get_command(app).commands
    assert list(sections) == list(commands)
    for name, command in commands.items():
        shown = []
        for options, meaning in find_rows(sections[name], "option") if command.params else []:
            default = re.search(r"; (required|default `.*`)$", meaning)
            shown += [(option, default and default[1]) for option in re.findall(r"`(.*?)`", options)]
        assert sorted(shown, key=str) == sorted(map(option_of, command.params), key=str)
        assert re.search(rf"^(?:\$ )?halfmesh {name}\b", sections[name], re.MULTILINE)


def test_what_the_page_of_commands_shows(run):
    run("cli.md", files=("config.py",))
    for command, expected in shown_commands("cli.md"):
        assert check(command) == expected
