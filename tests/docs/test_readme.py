"""README.md and CONTRIBUTING.md tell the truth: their Python runs, their messages and tables are the real ones."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import halfmesh
from halfmesh.amp.plugin import AMP_PLUGINS
from halfmesh.cli import app
from halfmesh.compat import Layout, composition_table, get_layout, render_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def find_blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def find_text(text):
    """The blocks without a language: what is printed."""
    return [
        block
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if not language
    ]


def find_python(text, first_line):
    """The one Python block that begins with `# first_line`."""
    found = [block for block in find_blocks(text, "python") if block.startswith(f"# {first_line}\n")]
    assert len(found) == 1, f"{len(found)} blocks begin with # {first_line}"
    return found[0]


def find_rows(text, header):
    """The cells of the Markdown table whose header begins with `header`."""
    table = text[text.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]


def stand_ins():
    """What the snippets expect a user to have: 2-layer model, optimizer, criterion and 60 samples."""
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    samples = TensorDataset(x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.02),
        "criterion": nn.CrossEntropyLoss(),
        "dataloader": DataLoader(samples, batch_size=4),
        "eval_dataloader": DataLoader(samples, batch_size=7),
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the README's config.py, where the snippets run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(find_python(README, "config.py"))
    return tmp_path


def check(command):
    """What a `$ halfmesh check ...` line prints."""
    _, *args = shlex.split(command.removeprefix("$ "))
    return CliRunner().invoke(app, args).stdout


# --- README ---------------------------------------------------------------------------------------------------------


def test_the_loop(folder, capsys):
    names = stand_ins()
    before = names["model"][0].weight.detach().clone()
    exec(find_python(README, "train.py"), names)
    # 15 batches in cycles of 4 make 4 updates an epoch, the last one of 3 batches
    assert re.fullmatch(r"12 updates, \d of them skipped, loss scale \d+\n", capsys.readouterr().out)
    assert names["engine"].config.fp16.mode == "naive"
    assert names["model"][0].weight.dtype == torch.float32, "the engine is closed: the model is as it came"
    assert not torch.equal(names["model"][0].weight, before)
    assert names["loss"] < 0.5


def test_the_longer_snippet(folder, capsys):
    pytest.importorskip("safetensors")
    names = stand_ins()
    exec(find_python(README, "more.py"), names)
    assert names["counts"][1] == 60
    assert names["result"].grad_norm > 0
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{names['engine'].global_step:08d}"]
    assert (folder / "model.safetensors").stat().st_size > 0
    assert capsys.readouterr().out.startswith("accuracy ")


def test_the_division_of_a_model():
    names = {}
    exec(find_python(README, "parallel.py"), names)
    config = halfmesh.load_config({"parallel": names["parallel"]})
    assert halfmesh.compat.check(config, 8) == []
    assert get_layout(config, 8) == Layout(pipeline=2, data=2, tensor=2)


def test_precision_alone():
    names = stand_ins()
    exec(find_python(README, "alone.py"), names)
    assert names["optimizer"].loss_scale >= 2.0**13
    assert names["loss"] < 0.7
    assert names["model"].state_dict()["0.weight"].dtype == torch.float32


def test_the_check_of_the_config(folder):
    block = next(block for block in find_blocks(README, "console") if "can run" in block)
    command, expected = block.split("\n", 1)
    assert check(command) == expected


MISTAKES = re.findall(r"^```python\n# mistake\n(.*?)^```\n```console\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(3))
def test_the_mistakes(number, folder):
    assert len(MISTAKES) == README.count("# mistake") == 3
    config, shown = MISTAKES[number]
    (folder / "config.py").write_text(config)
    command, expected = shown.split("\n", 1)
    assert check(command) == expected


def test_the_composition_table():
    assert f"\n{render_table()}\n" in README


def test_every_layout_is_built_as_it_says():
    assert set(composition_table()["none"].values()) == {"yes"}


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_named_files_exist(text):
    named = re.findall(r"(?:halfmesh|amp|engine|parallel|configs?|tests|examples)/[\w/]+\.py", text)
    named += re.findall(r"\]\((\w+\.md)\)", text)
    new = {"halfmesh/amp/pure_amp.py"}
    missing = [
        name
        for name in named
        if name not in new and not any((ROOT / base / name).exists() for base in ("", "halfmesh"))
    ]
    assert named
    assert not missing


# --- CONTRIBUTING ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pure(tmp_path, monkeypatch):
    """The plugin of CONTRIBUTING, imported from its file as a user would."""
    (tmp_path / "pure_amp.py").write_text(find_python(CONTRIBUTING, "pure_amp.py"))
    (tmp_path / "config.py").write_text(find_python(CONTRIBUTING, "config.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import pure_amp  # type: ignore[import-not-found]

    yield pure_amp.PureAMP
    AMP_PLUGINS.unregister("pure")
    sys.modules.pop("pure_amp")


def test_the_plugin_trains(pure):
    given = stand_ins()
    given.pop("eval_dataloader")
    given["optimizer"] = torch.optim.SGD(given["model"].parameters(), lr=0.5)
    with halfmesh.initialize(*given.values(), config="config.py") as engine:
        losses = []
        for _ in range(10):
            for x, y in engine.dataloader:
                engine.zero_grad()
                output = engine(x)
                loss = engine.criterion(output, y)
                engine.backward(loss)
                result = engine.step()
                losses.append(loss.item())
        assert result.loss_scale == 64.0
        assert output.dtype == torch.float32
        assert {param.dtype for param in engine.model.parameters()} == {torch.float16}
        assert engine.optimizer.param_groups[0]["params"][0] is engine.model[0].weight  # no masters
    assert sum(losses[-15:]) < sum(losses[:15]) / 2


def test_the_plugin_is_checked(pure):
    cells = composition_table()
    assert (cells["pure fp16"]["replicate"], cells["pure bf16"]["tensor"]) == ("yes", "refused")
    with pytest.raises(halfmesh.ConfigError, match=r"bf16.scale: bf16 has the range of fp32"):
        halfmesh.load_config({"bf16": {"mode": "pure", "scale": 2.0}})
    with pytest.raises(halfmesh.IncompatibleConfigError, match="pure has not been tried with tensor parallelism"):
        halfmesh.compat.raise_for(
            halfmesh.compat.check(halfmesh.load_config({"fp16": {"mode": "pure"}, "parallel": {"tensor": 2}}), 2)
        )


def test_the_example_of_a_distributed_test(tmp_path, monkeypatch):
    (tmp_path / "averaging.py").write_text(find_python(CONTRIBUTING, "test_average.py"))
    monkeypatch.syspath_prepend(tmp_path)  # the ranks import it by name, from the same path
    import averaging  # type: ignore[import-not-found]

    averaging.test_average()
