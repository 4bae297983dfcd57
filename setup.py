"""Everything is declared in pyproject.toml, but for two things: configs/, which an installed halfmesh has, too, and the
README that an index of packages shows, where relative links lead nowhere."""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithConfigs(build_py):
    """Copies configs/ to halfmesh/configs, where `halfmesh configs` finds it."""

    def run(self):
        super().run()
        if self.editable_mode:  # the repository's own are found
            return
        for path in sorted(ROOT.joinpath("configs").glob("*.py")):
            target = Path(self.build_lib, "halfmesh", "configs", path.name)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


def read_readme() -> str:
    """README.md with links to the source's files at their address."""
    source = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = ROOT.joinpath("README.md").read_text()
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:)", rf"\1{source}/raw/main/", text)  # an image itself, not a page about it
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({source}/blob/main/", text)


setup(
    cmdclass={"build_py": BuildWithConfigs},
    long_description=read_readme(),
    long_description_content_type="text/markdown",
)
