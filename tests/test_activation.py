"""Which modules the key `activation_checkpoint` chooses, and what it and `activation_offload` are refused with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh.activation import resolve
from halfmesh.compat import check
from halfmesh.compilation import resolve as resolve_compile
from halfmesh.config.activations import CheckpointConfig
from halfmesh.config.load import load_config
from halfmesh.config.schema import CompileConfig
from halfmesh.errors import ConfigError, IncompatibleConfigError
from halfmesh.parallel.pipeline.partition import resolve as resolve_partition
from tests.support.models import MLP, make_engine


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def options(form) -> CheckpointConfig:
    return load_config({"activation_checkpoint": form}).activation_checkpoint


def names_of(form, model: nn.Module | None = None) -> list[str]:
    found, problems = resolve(model or Model(), options(form), None, None)
    assert not problems
    assert found is not None
    return list(found.names)


def problems_of(form, model: nn.Module | None = None, partition=None, compiled=None) -> str:
    found, problems = resolve(model or Model(), options(form), partition, compiled)
    assert found is None
    (problem,) = problems
    return problem


@pytest.mark.parametrize("form", [False, None])
def test_off(form):
    assert not options(form).enabled
    assert options(form) == load_config({}).activation_checkpoint


def test_forms_mean_the_same():
    assert options(True) == options("full") == options({"every": 1})
    assert options("selective") == options({"selective": True}) == options({"every": 1, "selective": True})
    labels = {"full": "full", "selective": "selective"}
    assert {form: options(form).label for form in labels} == labels
    assert options({"every": 3}).label == "every=3"
    assert options({"patterns": ["a", "b.*"], "selective": True}).label == "a, b.*, selective"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("Full", r"'Full' does not say .* use 'full', 'selective', dict\(every=2\), .*; did you mean 'full'\?"),
        ("selectve", r"did you mean 'selective'\?"),
        (2, r"for every second block write dict\(every=2\)"),
        (["blocks.*"], r"does not say what is computed again"),
        ({}, r"does not say what is computed again"),
        ({"patterns": []}, r"does not say what is computed again"),
        ({"patterns": "blocks"}, r"activation_checkpoint.patterns: 'blocks' is not a list of names"),
        ({"pattern": ["blocks"]}, r"activation_checkpoint.pattern: unknown key; did you mean 'patterns'\?"),
        ({"every": 0}, r"activation_checkpoint.every: 0 is not an integer >= 1"),
        ({"every": 2, "patterns": ["a"]}, r"every and patterns are two ways to choose modules"),
    ],
)
def test_wrong_forms(form, message):
    with pytest.raises(ConfigError, match=message):
        options(form)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("full", [0, 1, 2, 3, 4]),
        ("selective", [0, 1, 2, 3, 4]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 4}, [0, 4]),
        ({"every": 9}, [0]),
        ({"patterns": ["blocks.[13]"]}, [1, 3]),
    ],
)
def test_blocks(form, expected):
    assert names_of(form) == [f"blocks.{number}" for number in expected]


def test_patterns():
    assert names_of({"patterns": ["blocks.0.mlp", "*.1.norm", "first"]}) == ["first", "blocks.0.mlp", "blocks.1.norm"]
    assert names_of({"patterns": ["blocks.*"]}, Model(2)) == ["blocks.0", "blocks.1"], "not what is in them"
    assert names_of({"patterns": ["*"]}, Model(2)) == ["first", "blocks.0", "blocks.1"], "not the model itself"
    assert names_of({"patterns": ["blocks.1.mlp", "blocks.1"]}) == ["blocks.1"]


def test_blocks_that_are_there_twice():
    model = Model()
    model.blocks.append(model.blocks[0])
    found, _ = resolve(model, options("full"), None, None)
    assert len(found.apply(model, None, lambda name: True)) == 5


def test_a_pattern_that_matches_nothing():
    assert problems_of({"patterns": ["block.*.mlp"]}) == (
        "activation_checkpoint: the pattern 'block.*.mlp' matches no module; did you mean 'blocks.*.mlp'?"
    )
    assert problems_of({"patterns": ["zzz"]}).endswith(
        "; it has blocks.*, blocks.*.mlp, blocks.*.mlp.*, blocks.*.norm, first"
    )
    assert problems_of({"patterns": ["blocks"]}) == (
        "activation_checkpoint: the pattern 'blocks' matches only blocks, which nobody calls as a whole; did you mean "
        "'blocks.*'?"
    )


def test_no_blocks():
    assert problems_of("full", MLP()) == (
        "activation_checkpoint: MLP has no repeated blocks (two or more modules of one class, with modules of their "
        "own, in a ModuleList or Sequential); name the modules: activation_checkpoint = dict(patterns=['first']); it "
        "has first, norm, again, tied, drop, last"
    )


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "grad_checkpointing"])
def test_a_model_that_checkpoints_itself(flag):
    model = Model()
    setattr(model.blocks[1], flag, True)
    assert problems_of("full", model).startswith(
        "activation_checkpoint: the model checkpoints itself already (blocks.1), and would compute these a third time; "
        "switch that off with model.gradient_checkpointing_disable()"
    )
    setattr(model.blocks[1], flag, False)
    assert names_of("full", model)


def test_models_of_others_that_checkpoint_themselves():
    timm = pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    vit = timm.create_model("vit_tiny_patch16_224", depth=2)
    assert len(names_of("full", vit)) == 2
    vit.set_grad_checkpointing(True)
    assert "checkpoints itself already (the model)" in problems_of("full", vit)
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=8
    )
    llama = transformers.LlamaForCausalLM(config)
    assert names_of("full", llama) == ["model.layers.0", "model.layers.1"]
    llama.gradient_checkpointing_enable()
    assert "checkpoints itself already (model" in problems_of("full", llama)
    llama.gradient_checkpointing_disable()
    assert names_of("full", llama)


def test_what_stages_do_not_call():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
    partition, problems = resolve_partition(model, 2, 1, "auto")
    assert not problems
    message = problems_of("full", model, partition)
    assert "Sequential has no repeated blocks that a stage of the pipeline calls as a whole" in message
    assert message.endswith("dict(patterns=['*.*']); it has *.*"), "their layers, and not the Sequentials"
    message = problems_of({"patterns": ["1"]}, model, partition)
    assert "matches 1, which is not called as a whole by a stage of the pipeline" in message
    assert resolve(model, options({"patterns": ["1*"]}), partition, None)[0].names == ("1.0", "1.1")


def test_compiled_code_around_it():
    compiled, _ = resolve_compile(Model(), CompileConfig(), 1, None, checkpoints=True)
    assert compiled.names == tuple(f"blocks.{number}" for number in range(5)), "blocks, also in one process"
    assert resolve(Model(), options({"every": 2}), None, compiled)[1] == []
    assert resolve(Model(), options({"patterns": ["first"]}), None, compiled)[1] == []
    message = problems_of({"patterns": ["*.mlp"]}, None, None, compiled)
    assert message.startswith("activation_checkpoint: blocks.0.mlp, blocks.1.mlp, blocks.2.mlp, blocks.3.mlp, ")
    assert "would be within compiled code" in message
    whole, _ = resolve_compile(MLP(), CompileConfig(), 1, None, checkpoints=True)
    assert "again would be within compiled code" in problems_of({"patterns": ["again"]}, MLP(), None, whole)


@pytest.mark.parametrize(
    ("config", "where", "message"),
    [
        ({"activation_checkpoint": "selective", "activation_offload": True}, "activation_offload", "cannot be moved"),
        ({"activation_checkpoint": "selective", "compile": True}, "activation_checkpoint", "one by one; use 'full'"),
        ({"activation_checkpoint": "full", "compile": {"scope": "model"}}, "compile.scope", "use 'blocks'"),
    ],
)
def test_keys_that_do_not_go_together(config, where, message):
    (finding,) = check(load_config(config), 1, "cpu")
    assert (finding.kind, finding.where) == ("refused", where)
    assert message in finding.message


def test_a_refusal_leaves_the_model_as_it_is():
    model = MLP()
    with pytest.raises(IncompatibleConfigError, match=r"MLP has no repeated blocks.* \n?.*"):
        make_engine({"activation_checkpoint": "full"}, model=model)
    assert not any("forward" in vars(module) for module in model.modules())
