"""Which modules the key `compile` compiles, and what it is refused with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from halfmesh import torch_private
from halfmesh.compat import check
from halfmesh.compilation import find_blocks, find_device_problem, resolve
from halfmesh.config.load import load_config
from halfmesh.config.schema import CompileConfig
from halfmesh.errors import IncompatibleConfigError
from halfmesh.parallel.pipeline.partition import resolve as resolve_partition
from tests.support import compiling
from tests.support.models import MLP, make_engine

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))

    def forward(self, x):
        return self.experts[0](self.layer(x))


class Other(Block):
    pass


class Table(nn.Module):
    """Rows that are in a list, in a dict, in other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Other(), Block()])
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.GELU()))
        self.parts = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleDict({"a": Block()})])


def test_blocks():
    assert list(find_blocks(nn.Sequential(Block(), Block()))) == ["0", "1"]
    assert list(find_blocks(MLP())) == []
    assert list(find_blocks(Table())) == [
        "blocks.0",
        "blocks.1.experts.0",  # alone of its class, it is looked into
        "blocks.1.experts.1",
        "blocks.2",
        "stages.0.0",
        "stages.0.1",
        "stages.1.0.experts.0",
        "stages.1.0.experts.1",
        "parts.0.0",
        "parts.0.1",
        "parts.1.a.experts.0",
        "parts.1.a.experts.1",
    ]


def test_blocks_of_known_models():
    timm = pytest.importorskip("timm")
    vit = timm.models.vision_transformer.VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=3, num_heads=2)
    assert list(find_blocks(vit)) == ["blocks.0", "blocks.1", "blocks.2"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    assert list(find_blocks(encoder)) == ["layers.0", "layers.1"]


def names(model, ranks=1, partition=None, **options):
    found, problems = resolve(model, CompileConfig(**options), ranks, partition)
    return found.names if found else problems


def test_scope():
    row = nn.Sequential(nn.Linear(4, 4), Block(), Block())
    assert names(row) == ("",)
    assert names(row, ranks=2) == ("1", "2")
    assert names(row, scope="blocks") == ("1", "2")
    assert names(row, ranks=2, scope="model") == ("",)
    assert names(MLP(), ranks=2) == ("",)
    none = "compile: MLP has no repeated blocks that could be compiled (two or more modules of one class, with modules "
    none += "of their own, in a ModuleList or Sequential); use scope='model'"
    assert names(MLP(), scope="blocks") == [none]


def test_scope_under_a_pipeline():
    row = nn.Sequential(nn.Linear(4, 4), Block(), Block())
    partition, _ = resolve_partition(row, 2, 1)
    assert names(row, 2, partition) == ("1", "2")
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    partition, _ = resolve_partition(plain, 2, 1)
    [line] = names(plain, 2, partition)
    assert line.startswith("compile: Sequential has no repeated blocks")
    assert line.endswith("; leave compile out, or the pipeline")


def test_a_block_that_is_there_twice_is_compiled_once():
    block = Block()
    found, _ = resolve(nn.Sequential(block, block), CompileConfig(scope="blocks", backend="eager"), 1, None)
    assert found.names == ("0", "1")
    assert found.apply(nn.Sequential(block, block), lambda name: True) == [block]
    torch_private.uncompile(block)


def test_only_what_a_rank_computes_is_compiled():
    row = nn.Sequential(Block(), Block(), Block(), Block())
    found, _ = resolve(row, CompileConfig(backend="eager"), 2, None)
    assert found.apply(row, lambda name: name in ("2", "3")) == [row[2], row[3]]
    assert not torch_private.is_compiled(row[0])


O1 = {"fp16": {"mode": "apex"}}
PIPE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
REFUSED = [
    (O1, True, "compile: O1's casts do not reach into compiled code; use mode='torch' (close to O1) or opt_level='O2'"),
    (
        {"fp16": {"mode": "apex", "opt_level": "O2", "backend": "apex"}},
        True,
        "compile: an installed apex changes torch's functions, which compiled code does not call; use backend='native'",
    ),
    (
        {},
        {"backend": "eager", "mode": "max-autotune"},
        "compile.mode: only backend='inductor' has modes, and the backend is 'eager'; remove one of the two",
    ),
    (
        PIPE,
        {"scope": "model"},
        "compile.scope: 'model' is not possible under a pipeline, whose stages call the model's blocks and never the "
        "model as a whole; use 'blocks', or leave scope out",
    ),
    (
        {"parallel": {"tensor": 2}},
        {"fullgraph": True},
        "compile.fullgraph: divided layers wait for other ranks, and a graph ends at each of these places",
    ),
]


@pytest.mark.parametrize(("config", "value", "message"), REFUSED)
def test_refusals(config, value, message):
    def find(more):
        findings = check(load_config(config | more), 2, "cpu")
        assert {finding.kind for finding in findings} <= {"refused"}
        return [str(finding) for finding in findings if finding.where.startswith("compile")]

    [line] = find({"compile": value})
    assert line.startswith(message)
    assert find({"compile": {**(value if isinstance(value, dict) else {}), "enabled": False}}) == []
    assert find({}) == []


@pytest.mark.parametrize("options", [{"opt_level": level} for level in ("O0", "O2", "O3")] + [{"enabled": False}])
def test_apex_without_casts_in_functions(options):
    assert check(load_config({"fp16": {"mode": "apex", **options}, "compile": True}), 1, "cpu") == []


@inductor_config.patch({"cpp.cxx": ("no-such-compiler",)})
def test_no_compiler():
    """It is found out before anything is changed."""
    message = r"compile: backend='inductor' needs a C\+\+ compiler for the CPU .*; install g\+\+ or clang, or name"
    model = MLP()
    with pytest.raises(IncompatibleConfigError, match=message):
        make_engine({"bf16": {"mode": "naive"}, "compile": True}, model=model)
    assert model.last.weight.dtype == torch.float32
    make_engine({"compile": {"backend": "aot_eager"}}, model=model).close()
    make_engine({"compile": False}, model=model)


def test_no_triton(monkeypatch):
    monkeypatch.setattr(torch_private, "has_triton", lambda: False)
    problem = find_device_problem(CompileConfig(), torch.device("cuda", 1))
    assert problem is not None
    assert problem.startswith("compile: backend='inductor' needs triton for cuda:1, which is not installed or does not")
    monkeypatch.setattr(torch_private, "has_triton", lambda: True)
    assert find_device_problem(CompileConfig(), torch.device("cuda", 1)) is None


def test_a_backend_that_was_registered_is_known():
    assert load_config({"compile": {"backend": compiling.NAME}}).compile.backend == compiling.NAME


def test_the_config_as_text():
    for value in (True, {"scope": "blocks"}, {"enabled": False, "scope": "blocks"}):
        config = load_config({"compile": value})
        assert config.to_dict() == {"compile": value}
        assert load_config(config.to_dict()) == config
    assert load_config({"compile": False}) == load_config({"compile": None}) == load_config({})
