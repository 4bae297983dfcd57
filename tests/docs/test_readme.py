"""README.md, docs/quickstart.md and CONTRIBUTING.md: their Python runs, their messages and tables are real."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib

import pytest
import torch

import halfmesh
from halfmesh import compat
from halfmesh.compat import composition_table, layout_table, mesh_sizes
from halfmesh.parallel.registries import AXES
from tests.support.pages import ROOT, check, find_blocks, read_page, shown_commands, snippet, stand_ins
from tests.support.ranks import end_teams, run_ranks

README = read_page("README.md")
MISTAKES = re.findall(r"^```python\n# mistake\n(.*?)^```\n```console\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the README's config.py, where the snippets run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(snippet("README.md", "config.py"))
    return tmp_path


def test_pages_name_the_same_axes_and_versions():
    pages = [" ".join(re.sub("^> ", "", page, flags=re.MULTILINE).split()) for page in (README, read_page("index.md"))]
    *axes, last = ("data", *AXES.names())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    torch_version = next(one for one in project["dependencies"] if one.startswith("torch>=")).removeprefix("torch>=")
    for page in pages:
        assert f"{', '.join(axes)} and {last} parallel" in page
        assert f"needs Python {python} and torch {torch_version} or later" in page
    tested = [re.findall(r"torch (2\.\d+), (2\.\d+) (?:and|or) (2\.\d+)", page) for page in pages]
    assert tested[0] == tested[1]
    assert tested[0][0][0] == torch_version
    assert f"Python {python} or later and torch {torch_version} or later" in read_page("install.md")


@pytest.mark.promise("`get_dataloader`, LinearWarmupLR, the loop")
@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_loop_before_and_after(sign, folder, caplog):
    (diff,) = find_blocks(README, "diff")
    loop = "\n".join(line[1:] for line in diff.splitlines() if line[0] in (" ", sign))
    names = stand_ins() | {"halfmesh": halfmesh, "device": torch.device("cpu")}
    exec(loop, names)
    assert names["loss"] < 0.5
    if sign == "+":
        engine = names["engine"]
        assert [block for block in find_blocks(README, "") if block.strip() in caplog.messages], "what it prints first"
        # 15 batches in cycles of 4 make 4 updates an epoch, the last one of 3 batches
        assert engine.global_step == 12
        assert {param.dtype for param in engine.model.parameters()} == {torch.float16}
        engine.close()
        assert names["model"][0].weight.dtype == torch.float32, "the engine is closed: the model is as it came"


def test_the_division_of_a_model():
    names = {}
    exec(snippet("README.md", "parallel.py"), names)
    config = halfmesh.load_config({"parallel": names["parallel"]})
    assert compat.check(config, 8) == []
    assert mesh_sizes(config, 8) == {"pp": 2, "dp": 2, "tp": 2}
    assert config.parallel.data.strategy == "zero1"


@pytest.mark.parametrize("number", range(2))
def test_the_mistakes(number, folder):
    assert len(MISTAKES) == README.count("# mistake") == 2
    config, shown = MISTAKES[number]
    (folder / "config.py").write_text(config)
    command, expected = shown.split("\n", 1)
    assert check(command) == expected


def test_every_mode_works_with_every_layout():
    works = {mode: cells for mode, cells in composition_table().items() if "yes" in cells.values()}
    apex = works.pop("apex fp16")
    assert [column for column, cell in apex.items() if cell == "yes"] == ["replicate"]
    assert {cell for cells in [*works.values(), *layout_table().values()] for cell in cells.values()} == {"yes"}


# --- docs/quickstart.md ---------------------------------------------------------------------------------------------


def without_halfmesh():
    """train.py of the quickstart with the lines that its diff takes away, in place of those it adds."""
    (diff,) = find_blocks(read_page("quickstart.md"), "diff")
    before, after = (
        "\n".join(line[1:] for line in diff.splitlines() if line[0] in (sign, " ")).strip() for sign in "-+"
    )
    script = snippet("quickstart.md", "train.py")
    assert after in script
    script = script.replace(after, before).replace("if engine.context.rank == 0:", "if True:")
    return script.replace(" after {engine.global_step} updates", "").replace("engine.close()", "")


def run_loop(rank, world_size, folder, name):
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(PROGRAMS[name], {})
    return printed.getvalue()


PROGRAMS = {"train.py": snippet("quickstart.md", "train.py"), "plain.py": without_halfmesh()}


@pytest.mark.distributed
def test_the_quickstart_in_one_process_and_in_two(run, tmp_path):
    """Losses depend on how a machine rounds; all else is printed as it is shown."""
    run("quickstart.md", files=("config.py",))
    shown = dict(shown_commands("quickstart.md"))
    plain = find_losses(run_loop(0, 1, tmp_path, "plain.py"))
    one = run_loop(0, 1, tmp_path, "train.py")
    two, nothing = run_ranks(run_loop, 2, tmp_path, "train.py")
    assert nothing == ""
    (tmp_path / "config.py").write_text(snippet("quickstart.md", "pipeline.py"))
    staged, _ = run_ranks(run_loop, 2, tmp_path, "train.py")
    torchrun = "$ torchrun --standalone --nproc-per-node 2 train.py"
    assert "$ halfmesh run --nproc 2 train.py --config config.py" in shown
    for printed, command in ((one, "$ python train.py"), (two, torchrun), (staged, "$ python train.py")):
        assert re.sub(r"loss \d\.\d+", "", printed) == re.sub(r"loss \d\.\d+", "", shown[command])
        losses = find_losses(printed)
        assert losses[-1] < losses[0] / 2
    assert find_losses(one) == pytest.approx(plain, abs=0.02)
    assert find_losses(staged) == pytest.approx(find_losses(one), abs=0.02)


def find_losses(printed):
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]


# --- CONTRIBUTING ---------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_the_example_of_a_distributed_test(tmp_path, monkeypatch):
    (tmp_path / "averaging.py").write_text(snippet("CONTRIBUTING.md", "test_average.py"))
    monkeypatch.syspath_prepend(tmp_path)  # the ranks import it by name, from the same path
    end_teams()
    import averaging  # type: ignore[import-not-found]

    averaging.test_average()
