"""Which modules `activation_checkpoint` chooses, and what it and `activation_offload` are rejected with."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError, IncompatibleConfigError
from tests.support.models import MLP, make_engine
from tests.support.ranks import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


def chosen(form) -> list[str]:
    """The modules whose forward runs again in backward."""
    model = Model()
    runs: Counter[str] = Counter()
    names = {module: name for name, module in model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(module) for module in names if type(module).forward is not nn.Module.forward}:

            def counted(module, *args, plain=kind.forward):
                runs[names[module]] += 1
                return plain(module, *args)

            patch.setattr(kind, "forward", counted)
        engine = make_engine({"activation_checkpoint": form}, model=model)
        x, y = next(iter(engine.dataloader))
        loss = engine.criterion(engine(x), y)
        before = runs.copy()
        engine.backward(loss)
    again = [name for name in names.values() if runs[name] > before[name]]
    return [name for name in again if not any(name.startswith(f"{other}.") for other in again)]


def blocks(*numbers: int) -> list[str]:
    return [f"blocks.{number}" for number in numbers]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (False, []),
        (True, blocks(0, 1, 2, 3, 4)),
        ({"every": 2}, blocks(0, 2, 4)),
        ({"patterns": ["*"]}, ["first", *blocks(0, 1, 2, 3, 4)]),
        ({"patterns": ["blocks.0.mlp", "*.1.norm", "first"]}, ["first", "blocks.0.mlp", "blocks.1.norm"]),
        ({"patterns": ["blocks.1.mlp", "blocks.1"]}, blocks(1)),
    ],
)
def test_which_modules_are_computed_again(form, expected):
    assert chosen(form) == expected


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("Full", r"'Full' does not say .* use 'full', 'selective', dict\(every=2\), "),
        (2, r"2 does not say what to recompute"),
        ({"patterns": "blocks"}, r"activation_checkpoint.patterns: expected a valid tuple, got 'blocks'"),
        ({"pattern": ["blocks"]}, r"activation_checkpoint.pattern: unknown key; did you mean 'patterns'\?"),
        ({"every": 0}, r"activation_checkpoint.every: expected greater than or equal to 1, got 0"),
        ({"every": 2, "patterns": ["a"]}, r"every and patterns both choose modules"),
    ],
)
def test_wrong_forms(form, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"activation_checkpoint": form})


def rejected(form, model: nn.Module | None = None, **config) -> str:
    """What a model is rejected with, or "nothing"."""
    try:
        make_engine({"activation_checkpoint": form, **config}, model=model or Model())
    except IncompatibleConfigError as error:
        return str(error)
    return "nothing"


def test_patterns_and_models_in_which_nothing_is_found():
    assert "'block.*.mlp' matches no module; did you mean 'blocks.*.mlp'?" in rejected({"patterns": ["block.*.mlp"]})
    assert "it has blocks.*, blocks.*.mlp, blocks.*.mlp.*, blocks.*.norm, first" in rejected({"patterns": ["zzz"]})
    words = "the pattern 'blocks' matches only blocks, which is never called as a whole; did you mean 'blocks.*'?"
    assert words in rejected({"patterns": ["blocks"]})
    model = MLP()
    words = "name the modules: activation_checkpoint = dict(patterns=['first']); it has first, norm, again, tied, drop"
    assert words in rejected("full", model)
    assert not any("forward" in vars(module) for module in model.modules()), "it is left alone"


def in_stages(rank: int, world_size: int) -> list[str]:
    """Two stages, which call the layers of nested Sequentials one by one."""
    pipeline = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
    models = (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))) for _ in range(3))
    forms = ("full", {"patterns": ["1"]}, {"patterns": ["1*"]})
    return [rejected(form, model, **pipeline) for form, model in zip(forms, models, strict=True)]


@pytest.mark.distributed
@pytest.mark.sends
def test_modules_that_no_stage_calls_as_a_whole():
    for full, pattern, layers in run_ranks(in_stages, 2):
        assert "Sequential has no repeated blocks that a stage of the pipeline calls as a whole" in full
        assert "dict(patterns=['*.*']); it has *.*" in full
        assert "matches 1, which is not called as a whole by a stage of the pipeline" in pattern
        assert layers == "nothing"


@pytest.mark.parametrize(
    ("form", "config", "message"),
    [
        ("selective", {"activation_offload": True}, "torch cannot move the tensors"),
        ("selective", {"compile": True}, "compiled code does not call; use 'full'"),
        ("full", {"compile": {"scope": "model"}}, "use 'blocks'"),
        ({"patterns": ["*.mlp"]}, {"compile": {"backend": "eager"}}, "would be inside compiled code"),
    ],
)
def test_keys_that_do_not_go_together(form, config, message):
    assert message in rejected(form, **config)
