"""fsdp: FSDP2 shards weights, gradients and state. Replicated data parallelism is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import halfmesh
from halfmesh.compat import check, raise_for
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.ranks import here, run_ranks
from tests.support.sharding import (
    CASES,
    MODES,
    Odd,
    batch,
    compare,
    differences,
    largest,
    make_engine,
    take_step,
    whole,
)
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed


@pytest.mark.promise("FSDP mixed precision")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_trains_as_replicated_weights_do(ranks):
    """Weights, optimizer state, norm and scale, with parts that are uneven, or empty."""
    for found in run_ranks(compare, ranks, "fsdp", CASES, timeout=150):
        assert len(found) == len(CASES)
        # FSDP2 adds up the gradients of several microbatches in fp32, and replicate in the parameters' dtype.
        rounded = {"naive_bf16 {'gradient_acc": 4e-3}
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


def _local(param):
    return param.detach().to_local() if isinstance(param, DTensor) else param.detach()


def held(rank, world_size):
    """Bytes of weights, masters and state per parameter; and which modules are sharded by themselves."""
    found = {}
    for mode in ("fp32", "naive_fp16"):
        model = Blocks(64)
        total = sum(p.numel() for p in model.parameters())
        engine = make_engine("fsdp", model=model, **MODES[mode])
        units = [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]
        take_step(engine, rank, 0)
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        assert all(p.grad is None for p in engine.model.parameters())
        tensors = [_local(param) for param in engine.model.parameters()] + list(engine.master_params())
        tensors += [v for state in engine.optimizer.state.values() for n, v in state.items() if n != "step"]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[mode] = sum(storages.values()) / total, units
        engine.close()
    return found


@pytest.mark.promise("optimizer state sharding")
@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_and_state_are_one_part_of_it(ranks):
    """16 bytes a parameter / ranks: an fp32 weight, which is the master, and the three moments of amsgrad."""
    for found in run_ranks(held, ranks):
        for bytes_held, units in found.values():
            assert bytes_held == pytest.approx(16 / ranks, rel=0.02)
            assert units == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def late(rank, world_size):
    """A layer that the optimizer holds later, by its new objects and by those that the model came with."""
    for new in (True, False):
        model = Blocks()
        before = list(model.end.parameters())
        engine = make_engine(
            "fsdp",
            model=model,
            optimizer=lambda groups: torch.optim.AdamW([p for g in groups for p in g["params"]][:4]),
        )
        engine.optimizer.add_param_group({"params": list(model.end.parameters()) if new else before})
        with pytest.raises(InputError, match=r"end.weight, end.bias came into the optimizer after initialize"):
            take_step(engine, rank, 0)


def test_parameters_that_come_later():
    run_ranks(late, 2)


def unsharded(rank, world_size):
    model = Odd()
    make_engine("fsdp", model=model, **MODES["naive_bf16"])
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def test_what_fsdp2_cannot_shard_stays_whole():
    """Scalars, and what is not contiguous."""
    assert run_ranks(unsharded, 2) == [["scale", "conv.weight"]] * 2


def loads(rank, world_size):
    """Whole tensors go into a sharded model; the shards of a model in half precision are its masters."""
    engine = make_engine("fsdp", **MODES["naive_fp16"])
    wanted = {n: torch.full_like(p, 1 / 3) for n, p in Odd().named_parameters()}
    engine.model.load_state_dict(wanted, strict=False)
    with pytest.raises(InputError, match="assign=True"):
        engine.model.load_state_dict(engine.model.state_dict(), assign=True)
    weights = close_whole(engine)
    exact = all(torch.equal(weights[n], value) for n, value in wanted.items())

    half = make_engine("fsdp", model=Blocks().half(), **MODES["naive_fp16"])
    take_step(half, rank, 0)
    inside = {str(p.dtype) for p in half.model.parameters()}
    return exact, inside, {str(value.dtype) for value in close_whole(half).values()}


@pytest.mark.promise("weights are not inherited; loading before wrapping; changed shapes")
def test_whole_weights_can_be_loaded():
    for exact, inside, after in run_ranks(loads, 2, timeout=60):
        assert exact
        assert (inside, after) == ({"torch.float32"}, {"torch.float32"})


class Seen(TorchDispatchMode):
    """Notes collectives, and the dtypes of what they carry."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            name = name.partition("::")[2].replace("_base", "").strip("_")
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.calls.append((name, str(tensors[0].dtype).removeprefix("torch.")))
        return func(*args, **(kwargs or {}))

    @property
    def gathers(self):
        return [dtype for kind, dtype in self.calls if "allgather" in kind or "all_gather" in kind]


def sends(rank, world_size, options):
    """Collectives of a step with two microbatches."""
    found = {}
    for name, data in options.items():
        config = MODES["naive_bf16"] | {"gradient_dtype": "auto", "gradient_accumulation": 2}
        engine = make_engine({"strategy": "fsdp", **data}, model=Blocks(), **config)
        for micro in range(2):
            take_step(engine, rank, micro)
        found[name] = []
        for micro in range(2):
            with Seen() as seen:
                take_step(engine, rank, micro)
            found[name].append(seen)
        engine.close()
    return found


@pytest.mark.promise(
    "FSDP mixed precision",
    "`param_dtype` from the mode, `reduce_dtype` fp32, `buffer_dtype`, resharding, prefetch, clipping; "
    "one reduction per cycle",
    of="PyTorch",
    page="sharding.md",
)
def test_what_is_sent():
    options = {
        "default": {},
        "kept": {"reshard_after_forward": False},
        "bf16": {"reduce_dtype": "bfloat16"},
        "prefetch": {"prefetch": 2},
    }
    for found in run_ranks(sends, 2, options, timeout=60):
        for name, (first, second) in found.items():
            scatters = [dtype for kind, dtype in second.calls if "reduce_scatter" in kind]
            assert not [kind for kind, _ in first.calls if "reduce_scatter" in kind], "reduced while accumulating"
            assert scatters == ["bfloat16" if name == "bf16" else "float32"] * 5
            # Each unit before its forward, and each but the root again before its backward. Weights travel in the dtype
            # that computes.
            assert first.gathers == second.gathers == ["bfloat16"] * (5 if name == "kept" else 9)


def gathers_beside_torch(rank, world_size):
    engine, plain = make_engine("fsdp", model=Blocks()), here(Blocks())
    for unit in (*plain.blocks, plain):
        fully_shard(unit)
    take_step(engine, rank, 0)  # the ranks also compare what was written before it
    with Seen() as ours:
        take_step(engine, rank, 1)
    x, y = batch(rank, 1)
    with Seen() as theirs:
        nn.functional.cross_entropy(plain(x), y).backward()
    return len(ours.gathers), len(theirs.gathers)


def test_gathers_as_often_as_fully_shard_does():
    """By torch's defaults: the root, with which backward begins, is gathered once."""
    assert run_ranks(gathers_beside_torch, 2) == [(9, 9)] * 2


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
    with pytest.raises(InputError, match=r"not summed the gradients of .* ends the cycle: loop over engine.dataloader"):
        engine.step(last=True)

    engine = make_engine("fsdp")
    x, y = batch(rank, 0)
    loss = engine.criterion(engine(x), y)
    handle = loss.register_hook(lambda grad: (_ for _ in ()).throw(ZeroDivisionError("in backward")))
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    handle.remove()
    with pytest.raises(InputError, match="gradients of an update were dropped before its end"):
        take_step(engine, rank, 0)


def test_what_is_refused():
    run_ranks(guards, 2)


PIPELINE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
REFUSED = [
    ({"compile": {"scope": "model"}}, {}, "gathers the weights of each block between graphs"),
    ({"activation_offload": True}, {}, "would also offload the gathered weights"),
    ({}, {"param_dtype": "bfloat16"}, "is not the dtype that the mode computes in"),
    ({"fp16": {"mode": "naive"}}, {"buffer_dtype": "float32"}, "is not the dtype that the mode computes in"),
    ({}, {"hybrid": 3}, "parallel.data.hybrid: 3 does not divide the 4 data ranks"),
    (PIPELINE, {"prefetch": 2}, "FSDP2 does not support this under a pipeline"),
    (PIPELINE, {"output_dtype": "float32"}, "FSDP2 does not support this under a pipeline"),
]


@pytest.mark.parametrize(("config", "data", "words"), REFUSED)
def test_keys_that_cannot_work(config, data, words):
    parallel = config.get("parallel", {}) | {"data": {"strategy": "fsdp", **data}}
    loaded = halfmesh.load_config(config | {"parallel": parallel})
    with pytest.raises(IncompatibleConfigError, match=words):
        raise_for(check(loaded, 8 if "pipeline" in parallel else 4, "cpu"))
