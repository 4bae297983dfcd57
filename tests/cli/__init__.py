from typer.testing import CliRunner, Result

from halfmesh.cli import app


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [*map(str, args)])


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())
