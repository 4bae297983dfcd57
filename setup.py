"""Everything is declared in pyproject.toml, but for one thing: configs/, which an installed halfmesh has, too."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copies configs/ to halfmesh/configs, where `halfmesh configs` finds it."""

    def run(self):
        super().run()
        if self.editable_mode:  # the repository's own are found
            return
        for path in sorted(Path(__file__).resolve().parent.joinpath("configs").glob("*.py")):
            target = Path(self.build_lib, "halfmesh", "configs", path.name)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithConfigs})
