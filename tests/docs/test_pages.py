"""What README.md, CONTRIBUTING.md and the pages quickstart, models, memory and planning show: their Python runs, their
messages and numbers are real."""

import contextlib
import io
import re
import tomllib

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh import compat
from halfmesh.compat import mesh_sizes
from halfmesh.parallel.registries import AXES
from tests.support.models import make_engine, train
from tests.support.pages import ROOT, check, find_blocks, find_rows, read_page, shown_commands, snippet, stand_ins
from tests.support.ranks import end_teams, run_ranks
from tests.support.saved_memory import bytes_left

README = read_page("README.md")


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
def test_the_loop_before_and_after(sign, run, caplog):
    run("README.md", files=("config.py",))
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


def test_the_mistakes(run, tmp_path):
    mistake = r"^```python\n# mistake\n(.*?)^```\n```console\n(.*?)\n(.*?)^```$"
    mistakes = re.findall(mistake, README, re.DOTALL | re.MULTILINE)
    assert len(mistakes) == README.count("# mistake") == 2
    for config, command, expected in mistakes:
        (tmp_path / "config.py").write_text(config)
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
    losses, expected = ([*map(float, re.findall(r"loss (\d\.\d+)", printed))] for printed in (staged, one))
    assert losses == pytest.approx(expected, abs=0.02)


@pytest.mark.distributed
def test_the_example_of_a_distributed_test(tmp_path, monkeypatch):
    (tmp_path / "averaging.py").write_text(snippet("CONTRIBUTING.md", "test_average.py"))
    monkeypatch.syspath_prepend(tmp_path)  # the ranks import it by name, from the same path
    end_teams()
    import averaging  # type: ignore[import-not-found]

    averaging.test_average()


def loader_of(*images):
    return DataLoader(TensorDataset(torch.randn(images), torch.randint(4, images[:1])), batch_size=8)


@pytest.mark.slow
def test_models_that_are_built_later(run):
    given = stand_ins() | {"torch": torch, "halfmesh": halfmesh, "config": {}, "dataloader": loader_of(32, 16)}
    engine = run("memory.md", "build.py", given=given)["engine"]
    assert len(train(engine)) == engine.global_step == 4


@pytest.mark.slow
def test_the_memory_that_activations_leave():
    for form, _, *expected in find_rows(read_page("memory.md"), "value | what is recomputed"):
        for mode, mebibytes in zip(({}, {"bf16": {"mode": "torch"}}), expected, strict=True):
            torch.manual_seed(0)
            config, gpt = {"activation_checkpoint": eval(form.strip("`"))}, GPT(64, 64, 6, 4, dropout=0.1)
            engine, ids = make_engine(mode | config, model=gpt), torch.randint(256, (8, 64))
            engine(ids)
            left = bytes_left(lambda engine=engine, ids=ids: engine(ids)) / 2**20
            assert left == pytest.approx(float(mebibytes), abs=0.006), form


@pytest.mark.slow
def test_the_dry_runs_of_the_page_about_planning(run):
    """The page shows some lines of what each command prints; versions of torch keep a little more or less."""

    def numbers_in(line):
        return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]

    pytest.importorskip("timm")
    run("planning.md", files=("config.py",))
    page = read_page("planning.md")
    commands = re.findall(r"^(halfmesh .*)$", page, re.MULTILINE)
    for command, shown in zip(commands, find_blocks(page, "text"), strict=True):
        printed = [(re.sub(r"[\d.]+", "#", line), numbers_in(line)) for line in check(f"$ {command}").splitlines()]
        for line in shown.splitlines():
            expected = re.sub(r"[\d.]+", "#", line), pytest.approx(numbers_in(line), rel=0.05)
            assert expected in printed, line


@pytest.mark.slow
def test_a_model_of_timm(run):
    timm = pytest.importorskip("timm")
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.manual_seed(0)
    given = {"timm": timm, "torch": torch, "halfmesh": halfmesh, "criterion": torch.nn.CrossEntropyLoss()}
    names = run("models.md", "timm_vit.py", given=given | {"images": loader_of(16, 3, 32, 32)})
    assert names["engine"].global_step == 2
    names["model"].load_state_dict(load_file("vit.safetensors"))


@pytest.mark.slow
def test_a_loss_without_all_logits(run):
    forward = run("memory.md", "large_vocabulary.py", given={"halfmesh": halfmesh})["forward"]
    model = type("Bigrams", (nn.Module,), {"forward": forward})()
    model.words, model.head = nn.Embedding(5000, 16), nn.Linear(16, 5000)
    ids, targets = torch.randint(5000, (2, 2, 8))
    engine = halfmesh.initialize(model, torch.optim.AdamW(model.parameters()), None, None, {})
    torch.testing.assert_close(engine(ids, targets), F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()))
    transformers = pytest.importorskip("transformers")
    given = {"LlamaForCausalLM": transformers.LlamaForCausalLM, "halfmesh": halfmesh}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, use_cache=False)
    model = run("models.md", "large_vocabulary.py", given=given)["Llama"](config)
    labels = torch.randint(1, 64, (4, 8))
    loss = model(labels, F.pad(labels, (0, 1), value=-100)[:, 1:])
    torch.testing.assert_close(loss, model(labels, labels=labels).loss)


@pytest.mark.slow
def test_a_weighted_loss(run):
    names = run("models.md", "weighted.py", given={})
    output = type("Output", (), {"logits": torch.zeros(2, 3, 4)})
    total, weight = names["criterion"](output, torch.tensor([[1, 2, -100], [1, 2, 3]]))
    assert (weight.item(), (total / weight).item()) == (3, pytest.approx(torch.log(torch.tensor(4.0)).item()))


@pytest.mark.slow
def test_the_table_of_models():
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    from tests.models_table.page import BEGIN, END, render

    again = "write it anew: .venv/bin/python -m tests.models_table.page"
    assert read_page("models.md").split(BEGIN)[1].split(END)[0] == render(), again
