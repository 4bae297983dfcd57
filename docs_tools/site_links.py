"""mkdocs: brings the repository's own pages into the site, points links at the right place, and weighs the search.

In the repository a page links to files beside it, which is what GitHub and editors follow. The site has only `docs/` as
its root: README, CONTRIBUTING, CHANGELOG and benchmarks join it under `repository/`. A link to any other file
(source, configs) leads to the repository.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "benchmarks/results/*.*")
"""Files outside docs/ that the site has, too."""
BOOSTS = {"index.md": 2, "quickstart.md": 2, "precision.md": 2, "loop.md": 2, "api": 0.5, "promises.md": 0.5}
"""How much more the search makes of a page or a folder; 1 for others."""
WORDS = {
    "migration/pytorch.md": ["DDP"],
    "nodes.md": ["torchrun", "multi-GPU"],
    "logging.md": ["TensorBoard", "wandb", "MLflow"],
    "loop.md": ["batch size"],
    "precision.md": ["mixed precision", "AMP"],
    "sharding.md": ["FSDP", "ZeRO"],
    "troubleshooting.md": ["OOM"],
}
"""What readers call the subject of a page, which does not call it so: the search finds the page by them first."""

_PART = re.compile(
    r"(^```.*?^```$|`[^`\n]+`(?!\]))|(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)", re.DOTALL | re.MULTILINE
)


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """mkdocs' event: mkdocs.yml was read. Addresses come from pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = urls["Documentation"], urls["Source"]
    config.repo_name, config.edit_uri = "Source", "edit/main/docs/"
    options = config.plugins["mkdocstrings"].config.handlers["python"]["options"]
    options["extra"] = {"source": f"{config.repo_url}/blob/main"}  # for docs_tools/templates
    return config


def on_files(files: Files, config: Any) -> Files:
    """mkdocs' event: the files of the site are known."""
    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, f"repository/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """mkdocs' event: a page was read."""
    page.meta |= {"search": weigh(page.file.src_uri), "tags": WORDS.get(page.file.src_uri, [])}
    return title(separate(rewrite(markdown, page.file.src_uri, {file.src_uri for file in files}, config.repo_url)))


def weigh(page: str) -> dict[str, Any]:
    """How the search ranks a page: answers to a beginner first, the repository's own pages not at all."""
    if page.startswith("repository/"):
        return {"exclude": True}
    return {"boost": BOOSTS.get(page.partition("/")[0], 1)}


def title(markdown: str) -> str:
    """`markdown` with the name of a snippet, which the repository's page has as its first comment, as its title."""
    return re.sub(r"^```python\n# ([\w/]+\.py)\n+", r'```python title="\1"\n', markdown, flags=re.MULTILINE)


def separate(markdown: str) -> str:
    """`markdown` with an empty line before each list and table: mkdocs needs it, GitHub and editors do not."""
    lines: list[str] = []
    in_code = False
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        begins_list = line.startswith("- ") and not before.startswith(("- ", " "))
        begins_table = line.startswith("|") and not before.startswith("|")
        if before and not in_code and (begins_list or begins_table):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def rewrite(markdown: str, page: str, known: set[str], source: str) -> str:
    """`markdown` of the site's `page`, with relative links as the site needs them.

    Args:
        known: the site's files.
        source: the address of the repository, which has all others.
    """
    here = page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"

    def replace(match: re.Match[str]) -> str:
        code, image, text, link = match.groups()
        if code is not None or re.match(r"[a-z]+:|#", link):
            return match[0]
        path, _, anchor = link.partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        inside = place.removeprefix("docs/")
        target = inside if inside != place else f"repository/{place}"
        if target not in known and inside == place:
            return f"{image}[{text}]({source}/{'raw' if image else 'blob'}/main/{place})"
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return _PART.sub(replace, markdown)
