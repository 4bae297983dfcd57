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
from halfmesh.compat import mesh_sizes
from halfmesh.parallel.registries import AXES
from tests.support.pages import ROOT, check, find_blocks, read_page, shown_commands, snippet, stand_ins
from tests.support.ranks import end_teams, run_ranks

README = read_page("README.md")
MISTAKES = re.findall(r"^```python\n# mistake\n(.*?)^```\n```console\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(snippet("README.md", "config.py"))
    return tmp_path


def test_pages_name_the_same_axes_and_versions():
    *axes, last = ("data", *AXES.names())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    torch_version = next(one for one in project["dependencies"] if one.startswith("torch>=")).removeprefix("torch>=")
    for page in (README, read_page("index.md")):
        text = " ".join(re.sub("^> ", "", page, flags=re.MULTILINE).split())
        assert f"{', '.join(axes)} and {last} parallel" in text
        assert f"needs Python {python} and torch {torch_version} or later" in text


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
        assert engine.global_step == 12, "15 batches in cycles of 4 make 4 updates an epoch"
        assert {param.dtype for param in engine.model.parameters()} == {torch.float16}


def test_the_division_of_a_model():
    exec(snippet("README.md", "parallel.py"), names := {})
    config = halfmesh.load_config({"parallel": names["parallel"]})
    assert (compat.check(config, 8), mesh_sizes(config, 8)) == ([], {"pp": 2, "dp": 2, "tp": 2})


@pytest.mark.parametrize("number", range(2))
def test_the_mistakes(number, folder):
    assert len(MISTAKES) == README.count("# mistake") == 2
    config, shown = MISTAKES[number]
    (folder / "config.py").write_text(config)
    command, expected = shown.split("\n", 1)
    assert check(command) == expected


TRAIN = snippet("quickstart.md", "train.py")


def run_loop(rank, world_size, folder):
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(TRAIN, {})
    return printed.getvalue()


@pytest.mark.distributed
def test_the_quickstart_in_one_process_and_in_two(run, tmp_path):
    """Losses depend on how a machine rounds; all else is printed as it is shown."""
    (diff,) = find_blocks(read_page("quickstart.md"), "diff")
    assert "\n".join(line[1:] for line in diff.splitlines() if line[0] in "+ ").strip() in TRAIN
    run("quickstart.md", files=("config.py",))
    shown = dict(shown_commands("quickstart.md"))
    one = run_loop(0, 1, tmp_path)
    two, nothing = run_ranks(run_loop, 2, tmp_path)
    assert nothing == ""
    (tmp_path / "config.py").write_text(snippet("quickstart.md", "pipeline.py"))
    staged, _ = run_ranks(run_loop, 2, tmp_path)
    torchrun = "$ torchrun --standalone --nproc-per-node 2 train.py"
    assert "$ halfmesh run --nproc 2 train.py --config config.py" in shown
    for printed, command in ((one, "$ python train.py"), (two, torchrun), (staged, "$ python train.py")):
        assert re.sub(r"loss \d\.\d+", "", printed) == re.sub(r"loss \d\.\d+", "", shown[command])
    assert find_losses(staged) == pytest.approx(find_losses(one), abs=0.02)


def find_losses(printed):
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]


@pytest.mark.distributed
def test_the_example_of_a_distributed_test(tmp_path, monkeypatch):
    (tmp_path / "averaging.py").write_text(snippet("CONTRIBUTING.md", "test_average.py"))
    monkeypatch.syspath_prepend(tmp_path)  # the ranks import it by name, from the same path
    end_teams()
    import averaging  # type: ignore[import-not-found]

    averaging.test_average()
