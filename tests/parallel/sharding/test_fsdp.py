"""fsdp: FSDP2 shards weights, gradients and state. Replicated data parallelism is the oracle."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import halfmesh
from halfmesh.compat import check, raise_for
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.ranks import run_ranks
from tests.support.sharding import (
    CASES,
    MODES,
    OPTIMIZERS,
    Odd,
    batch,
    compare,
    differences,
    largest,
    make_engine,
    take_step,
    whole,
)

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_as_replicated_weights_do(ranks):
    """Weights, optimizer state, norm and scale, with parts that are uneven, or empty."""
    for found in run_ranks(compare, ranks, "fsdp", CASES, timeout=150):
        assert len(found) == len(CASES)
        # FSDP2 adds up the gradients of several microbatches in fp32, and replicate in the parameters' fp16. A weight
        # that is used twice has its two gradients rounded in another order.
        rounded = {"naive_fp16 {'gradient_acc": 4e-3, "naive_bf16 {'gradient_acc": 4e-3}
        assert largest(found, **rounded) <= 1, found


class Blocks(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(7, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.end = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def bytes_held(model, update):
    """Of weights, masters and moments on this rank."""
    tensors = [_local(param) for param in model.parameters()]
    tensors += list(update.holdings.masters.values())
    tensors += [v for state in update.optimizer.state.values() for n, v in state.items() if n != "step"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _local(param):
    return param.detach().to_local() if isinstance(param, DTensor) else param.detach()


def held(rank, world_size):
    found = {}
    for mode in ("fp32", "naive_fp16"):
        model = Blocks(64)
        total = sum(p.numel() for p in model.parameters())
        engine = make_engine("fsdp", model=model, **MODES[mode])
        units = [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]
        take_step(engine, rank, 0)
        dtypes = {str(p.dtype) for p in engine.model.parameters()}
        gradients = [p.grad for p in engine.model.parameters() if p.grad is not None]
        found[mode] = bytes_held(engine.model, engine._update) / total, units, dtypes, len(gradients)
        engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_and_state_are_one_part_of_it(ranks):
    """12 bytes a parameter / ranks: an fp32 weight, which is the master, and two moments (amsgrad: three)."""
    for found in run_ranks(held, ranks, timeout=60):
        for held_bytes, units, dtypes, gradients in found.values():
            assert held_bytes == pytest.approx(16 / ranks, rel=0.02)
            assert units == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
            assert dtypes == {"torch.float32"}
            assert gradients == 0


def gives_back(rank, world_size):
    model = Odd()
    params = dict(model.named_parameters())
    classes = [type(module) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    engine = make_engine("fsdp", model=model, **MODES["naive_bf16"])
    inside = [name for name, p in engine.model.named_parameters() if not isinstance(p, DTensor)]
    take_step(engine, rank, 0)
    engine.close()
    found = {
        "parameters": all(params[name] is param for name, param in model.named_parameters()),
        "names": list(params) == [name for name, _ in model.named_parameters()],
        "tied": model.again.weight is model.tied.weight,
        "classes": classes == [type(module) for module in model.modules()],
        "attributes": [set(vars(m)) - a for m, a in zip(model.modules(), attributes, strict=True) if set(vars(m)) - a],
        "hooks": hooks == [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        "dtypes": {str(p.dtype) for p in model.parameters()} | {str(b.dtype) for b in model.buffers()},
        "whole inside": inside,
        "runs": torch.isfinite(model(batch(rank, 0)[0])).all().item(),
        "copy": copy.deepcopy(model) is not None,
        "pickle": len(pickle.dumps(model)) > 0,
        "loads": not any(model.load_state_dict(model.state_dict())),
    }
    again = make_engine("fsdp", model=model)
    found["again"] = take_step(again, rank, 1) is not None
    again.close()
    return found


def test_close_gives_the_model_back_as_it_came():
    for found in run_ranks(gives_back, 2, timeout=60):
        assert found.pop("attributes") == []
        assert found.pop("dtypes") == {"torch.float32", "torch.int64"}
        assert found.pop("whole inside") == ["scale", "conv.weight"]
        assert all(found.values()), found


def loads(rank, world_size):
    """Whole tensors go into a sharded model; of a model in half precision, too."""
    engine = make_engine("fsdp", **MODES["naive_fp16"])
    wanted = {n: torch.full_like(p, 1 / 3) for n, p in Odd().named_parameters()}
    engine.model.load_state_dict(wanted, strict=False)
    with pytest.raises(InputError, match="assign=True"):
        engine.model.load_state_dict(engine.model.state_dict(), assign=True)
    engine.close()
    exact = all(torch.equal(p, wanted[n]) for n, p in engine.model.named_parameters())

    half = make_engine("fsdp", model=Blocks().half(), **MODES["naive_fp16"])
    take_step(half, rank, 0)
    inside = {str(p.dtype) for p in half.model.parameters()}
    half.close()
    return exact, inside, {str(p.dtype) for p in half.model.parameters()}


def test_whole_weights_can_be_loaded():
    for exact, inside, after in run_ranks(loads, 2, timeout=60):
        assert exact
        assert (inside, after) == ({"torch.float32"}, {"torch.float16"})


def sends(rank, world_size, options):
    """Collectives of a step with two microbatches, and the dtypes of what they carry."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            if name.startswith(("c10d::", "_c10d_functional::")):
                name = name.partition("::")[2].replace("_base", "").strip("_")
                tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                seen.append((name, str(tensors[0].dtype).removeprefix("torch.")))
            return func(*args, **(kwargs or {}))

    found = {}
    for name, data in options.items():
        config = MODES["naive_bf16"] | {"gradient_dtype": "auto", "gradient_accumulation": 2}
        engine = make_engine({"strategy": "fsdp", **data}, model=Blocks(), **config)
        for micro in range(2):
            take_step(engine, rank, micro)
        seen = []
        with Seen():
            for micro in range(2):
                seen.append("microbatch")
                take_step(engine, rank, micro)
        second = seen[1:].index("microbatch") + 1
        found[name] = seen[1:second], seen[second + 1 :]
        engine.close()
    return found


def test_what_is_sent():
    options = {
        "default": {},
        "kept": {"reshard_after_forward": False},
        "bf16": {"reduce_dtype": "bfloat16"},
        "prefetch": {"prefetch": 2},
    }
    for found in run_ranks(sends, 2, options, timeout=60):
        for name, (first, second) in found.items():
            scatters = [dtype for kind, dtype in second if "reduce_scatter" in kind]
            gathers = [dtype for kind, dtype in first if "allgather" in kind or "all_gather" in kind]
            assert not [kind for kind, _ in first if "reduce_scatter" in kind], "reduced while accumulating"
            assert scatters == ["bfloat16" if name == "bf16" else "float32"] * 5
            assert set(gathers) == {"bfloat16"}, "weights travel in the dtype that computes"
            # Each unit before its forward, and again before its backward, where it gave its weights up. (FSDP2 keeps
            # those of the last unit that it knows to come first in backward.)
            assert len(gathers) == 5 if name == "kept" else len(gathers) > 5


def hybrid(rank, world_size):
    ours = make_engine({"strategy": "fsdp", "hybrid": 2}, model=Blocks(), track_grad_norm=True)
    theirs = make_engine("replicate", model=Blocks(), track_grad_norm=True)
    norms = [(take_step(ours, rank, s).grad_norm, take_step(theirs, rank, s).grad_norm) for s in range(3)]
    part = _local(ours.model.end.weight).shape
    return norms, part, max(differences(whole(ours), whole(theirs)).values())


def test_hybrid_sharding():
    """Two copies of two parts."""
    for norms, part, difference in run_ranks(hybrid, 4, timeout=60):
        assert part == (2, 32)
        assert difference <= 2e-6
        for ours, theirs in norms:
            assert ours == pytest.approx(theirs, rel=1e-6)


def guards(rank, world_size):
    engine = make_engine("fsdp", gradient_accumulation=2)
    take_step(engine, rank, 0)
    with pytest.raises(InputError, match="ended a cycle whose last backward had run already"):
        engine.step(last=True)
    engine.close()

    engine = make_engine("fsdp", optimizer=partial(torch.optim.AdamW, lr=0.1))
    x, y = batch(rank, 0)
    loss = engine.criterion(engine(x), y)
    handle = loss.register_hook(lambda grad: (_ for _ in ()).throw(ZeroDivisionError("in backward")))
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    handle.remove()
    with pytest.raises(InputError, match="gradients of an update were dropped before its end"):
        take_step(engine, rank, 0)
    mixed = Blocks()
    mixed.end.double()
    with pytest.raises(IncompatibleConfigError, match=r"gathers weights of one dtype together, but end\.weight"):
        make_engine("fsdp", model=mixed)
    assert type(mixed) is Blocks
    with pytest.raises(IncompatibleConfigError) as caught:
        make_engine("fsdp", optimizer=lambda groups: torch.optim.Adafactor(groups))
    return str(caught.value)


def test_what_is_refused():
    for message in run_ranks(guards, 2, timeout=60):
        assert "Adafactor steps a parameter as a whole" in message


REFUSED = {
    "scope": (
        {"compile": {"scope": "model"}},
        {},
        IncompatibleConfigError,
        "blocks gather their weights between graphs",
    ),
    "activation_offload": (
        {"activation_offload": True},
        {},
        IncompatibleConfigError,
        "would move the gathered weights",
    ),
    "param_dtype": ({}, {"param_dtype": "bfloat16"}, IncompatibleConfigError, "is not what the mode computes in"),
    "buffer_dtype": (
        {"fp16": {"mode": "naive"}},
        {"buffer_dtype": "float32"},
        IncompatibleConfigError,
        "is not what the mode casts the model to",
    ),
    "hybrid": ({}, {"hybrid": 3}, IncompatibleConfigError, "parallel.data.hybrid: 3 does not divide the 4 data ranks"),
    "reshard_after_forward": (
        {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}},
        {"reshard_after_forward": False},
        IncompatibleConfigError,
        "which FSDP2 does not do right under a pipeline",
    ),
    "prefetch": (
        {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}},
        {"prefetch": 2},
        IncompatibleConfigError,
        "cannot gather ahead under a pipeline",
    ),
    "output_dtype": (
        {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}},
        {"output_dtype": "float32"},
        IncompatibleConfigError,
        "cannot be had under a pipeline",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_cannot_work(name):
    config, data, error, words = REFUSED[name]
    parallel = config.get("parallel", {}) | {"data": {"strategy": "fsdp", **data}}
    loaded = halfmesh.load_config(config | {"parallel": parallel})
    findings = check(loaded, 8 if "pipeline" in parallel else 4, "cpu")
    with pytest.raises(error, match=words):
        raise_for(findings)


def uneven(rank, world_size, rows):
    from torch.utils.data import DataLoader, TensorDataset

    model = Blocks()
    data = TensorDataset(torch.randn(rows, 7), torch.randint(4, (rows,)))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    config = {"parallel": {"data": "fsdp"}}
    loaders = {"dataloader": DataLoader(data, 2), "eval_dataloader": DataLoader(data, 2)}
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu", **loaders)
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    engine.eval()
    with torch.no_grad():
        seen = sum(len(engine(x)) for x, _ in engine.eval_dataloader)
    engine.close()
    return seen


def test_evaluation_needs_as_many_batches_on_each_rank():
    assert run_ranks(uneven, 2, 12, timeout=60) == [6, 6]
    with pytest.raises(Exception, match=r"eval_dataloader has 2 batches on some ranks and 1 on others"):
        run_ranks(uneven, 2, 5, timeout=60)


def test_one_process_has_nothing_to_shard():
    engine = make_engine("fsdp")
    assert engine._division.sharded is None
    assert math.isfinite(take_step(engine, 0, 0).lr)
    engine.close()


def planned(rank, world_size):
    from halfmesh.memory import state_bytes

    engine = make_engine("fsdp", optimizer=lambda groups: torch.optim.AdamW(groups), model=Blocks(64))
    numel = sum(p.numel() for p in engine.model.parameters())
    counted = state_bytes(engine.model, engine._update, torch.float32)
    engine.close()
    return counted.parameters / numel, counted.optimizer / numel, counted.gradients / numel


def test_the_plan_counts_parts():
    for figures in run_ranks(planned, 2, timeout=60):
        assert figures == pytest.approx((4 / 2, 8 / 2, 4 / 2), rel=0.01)
