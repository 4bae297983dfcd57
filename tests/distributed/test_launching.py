"""What each launch function reads, makes and rejects, and who ends the process group."""

import gc
import os
import random
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.config.load import load_config
from halfmesh.distributed.env import RankNames, list_ranks, ranks_by_value
from halfmesh.distributed.local_ranks import free_port
from halfmesh.engine import launch as launching
from halfmesh.engine.launch import choose_device, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from halfmesh.errors import ConfigError, InputError, LaunchError
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Sets variables of the environment, which has no launcher's at first."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)

    def change(values, **changes):
        for name, value in {**values, **changes}.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    return change


def pretend_gpus(monkeypatch, count):
    """Let torch report `count` GPUs; the list gets the devices that are made current."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("argument", "seed"), [(None, 11), (6, 6)])
def test_python_train_py_is_a_launch_of_one(tmp_path, argument, seed):
    (tmp_path / "config.py").write_text("seed = 11\nNUM_EPOCHS = 3\n")
    hook = sys.excepthook
    with launch_from_torch(str(tmp_path / "config.py"), seed=argument, device="cpu") as run:
        assert (run.rank, run.world_size, run.local_rank, run.device, run.group) == (0, 1, 0, CPU, None)
        assert (run.config.seed, run.config.NUM_EPOCHS) == (seed, 3)
        assert not dist.is_initialized()
        assert sys.excepthook is hook
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    assert drawn == (random.random(), float(np.random.rand()), torch.rand(1).item())


@pytest.mark.promise("launchers", "torchrun, SLURM, Open MPI", of="Colossal-AI", page="nodes.md")
def test_slurm_and_open_mpi_tell_the_place(variables, monkeypatch):
    variables(OPENMPI)
    assert launch_from_openmpi({}, "host", 1, device="cpu").world_size == 1
    joined = []
    monkeypatch.setattr(launching, "make_group", lambda *given: joined.append(given[:3]))
    variables(SLURM, SLURM_NPROCS=None, SLURM_NTASKS="8", SLURM_PROCID="5", SLURM_LOCALID="1")
    run = launch_from_slurm({"parallel": {"tensor": 2}}, "host", 1, device="cpu", verbose=False)
    assert (run.rank, run.world_size, run.local_rank, run.dp_rank, run.dp_size) == (5, 8, 1, 2, 4)
    assert joined == [(5, RankNames(8, {"pp": 1, "dp": 4, "tp": 2}), ("host", 1))]


def test_messages_name_ranks_by_their_place_in_the_mesh():
    mesh = RankNames(8, {"pp": 1, "dp": 4, "tp": 2})
    assert mesh.names([5, 0]) == "rank 0 (dp 0, tp 0), rank 5 (dp 2, tp 1)"
    assert mesh.names(range(7)) == "ranks 0-6"
    assert RankNames(8, {"pp": 1, "dp": 8, "tp": 1}).name(5) == "rank 5"
    assert RankNames(8).names([7, 3, 2, 1, 0]) == "ranks 0-3, 7"
    shortened = "ranks 2-7, 10-15, 18-23, 26-31, 34-39, 42-47, 50-55, 58-63 and 720 more"
    assert list_ranks(rank for rank in range(1024) if rank % 8 > 1) == shortened
    assert ranks_by_value(dict(enumerate("abac"))) == {"a": [0, 2], "b": [1], "c": [3]}


def test_each_local_rank_gets_its_gpu_and_one_that_is_visible_is_taken(monkeypatch):
    current = pretend_gpus(monkeypatch, 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == torch.device("cuda:3")
    assert choose_device("cuda", 2) == torch.device("cuda:2")
    assert choose_device("cuda:1", 2) == torch.device("cuda:1")
    assert choose_device("cpu", 2) == CPU
    assert current == [3, 2, 1]
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)  # by mp.spawn, for example
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 6)
    assert choose_device() == torch.device("cuda:2")
    pretend_gpus(monkeypatch, 1)  # as under srun --gpus-per-task=1
    assert choose_device(None, 3) == choose_device("cuda", 3) == torch.device("cuda:0")


def test_what_is_offloaded_needs_a_backend_of_the_host_too(monkeypatch):
    offloaded = load_config({"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}})
    pretend_gpus(monkeypatch, 1)
    asked = []
    monkeypatch.setattr(launching, "make_group", lambda *args: asked.append(args[-1]))
    for config, backend in ((offloaded, None), (offloaded, "nccl"), ({}, None)):
        launch(config, 0, 1, "localhost", 1, backend=backend)
    assert asked == ["cpu:gloo,cuda:nccl", "nccl", None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, r"^RANK is missing .* launch_from_torch expects .* torchrun --nproc-per-node N train.py"),
        ({"RANK": "first"}, r"^RANK is 'first' in the environment: launch_from_torch expects a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank 2 is impossible with world size 2: ranks go"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": None}, r"could not join .* MASTER_ADDR expected"),
    ],
)
def test_variables_of_torchrun_that_cannot_be(variables, changes, message):
    variables(TORCHRUN, **changes)
    with pytest.raises(LaunchError, match=message):
        launch_from_torch({}, device="cpu")


@pytest.mark.parametrize(
    ("variable", "function"),
    [("SLURM_STEP_NUM_TASKS", "launch_from_slurm"), ("OMPI_COMM_WORLD_SIZE", "launch_from_openmpi")],
)
def test_several_processes_never_train_alone_by_mistake(monkeypatch, variable, function):
    monkeypatch.setenv(variable, "4")
    message = rf"{variable}=4: .* would train alone; call {function} instead"
    with pytest.raises(LaunchError, match=message):
        launch_from_torch({}, device="cpu")
    with pytest.raises(LaunchError, match=message):
        halfmesh.initialize(nn.Linear(2, 2), torch.optim.SGD, config={}, device="cpu")


def test_peers_that_never_come_and_a_port_in_use():
    with pytest.raises(LaunchError, match=r"rank 0 of 2 could not join .* Start all 2 processes"):
        launch({"timeout": 0.5}, 0, 2, "127.0.0.1", free_port(), device="cpu")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"rank 0 of 2 could not join .* at 127.0.0.1:{port} within 0.5 s"):
            launch({"timeout": 0.5}, 0, 2, "127.0.0.1", port, device="cpu")
    assert not dist.is_initialized()


def test_a_rejection_is_in_torchruns_summary(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ConfigError):
        launch_from_torch({"sed": 1})
    assert "did you mean 'seed'" in (tmp_path / "error.json").read_text()


# --- two processes ----------------------------------------------------------------------------------------------------


def threads_of_gloo():
    found = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):
            found.append(path.read_text())
    return [name for name in found if name.startswith("pt_gloo")]


def close_one_engine(rank, world_size, port):
    """When it is gone there is no thread of gloo: one at work aborts a process that shuts down."""

    def train():
        with launch({}, rank, world_size, "127.0.0.1", port, device="cpu") as run:
            engine = halfmesh.initialize(nn.Linear(4, 2), torch.optim.SGD, config=run)
            engine.backward(engine(torch.rand(2, 4) + rank).sum())
            engine.step()
            engine.close()

    train()
    gc.collect()
    until = time.monotonic() + 10  # the kernel lists a thread a moment longer than it runs
    while threads_of_gloo() and time.monotonic() < until:
        time.sleep(0.1)
    return threads_of_gloo()


@pytest.mark.distributed
def test_an_engine_that_is_closed_and_gone_leaves_no_thread_of_gloo():
    assert run_ranks(close_one_engine, 2, free_port(), init=False, fresh=True) == [[], []]


def use_launch(rank, world_size, port):
    """A launch makes a group, seeds alike and cleans up, thrice at the same address; then its error is reported."""
    weights = []
    for number in range(3):
        with launch({"seed": 3, "timeout": 30.0}, rank, world_size, "127.0.0.1", port, device="cpu") as run:
            total = torch.tensor([float(run.rank + number)])
            dist.all_reduce(total)
            assert total.item() == 1 + 2 * number
            assert (dist.get_backend(), run.local_rank) == ("gloo", rank)
            guard = sys.excepthook
            weights.append(nn.Linear(2, 2).weight.tolist())
            halfmesh.initialize(nn.Linear(4, 4), torch.optim.SGD, config=run).close()
            assert dist.is_initialized(), "it is the launch's"
        assert sys.excepthook is not guard
        assert not dist.is_initialized()
    with pytest.raises(LookupError), launch({}, rank, world_size, "127.0.0.1", port, device="cpu"):
        raise LookupError
    assert dist.is_initialized(), "it is on its way out, and the other rank has to hear of it"
    existing = launch({}, rank, world_size, "ignored", 1, device="cpu")
    existing.close()
    assert (existing.group, dist.is_initialized()) == (None, True)
    assert launch_from_torch({}, device="cpu").rank == rank
    return weights


@pytest.mark.distributed
def test_launch_joins_seeds_alike_and_cleans_up():
    first, second = run_ranks(use_launch, 2, free_port(), init=False, fresh=True)
    assert first == second


def make_two(data="replicate"):
    """Two engines, which share a group that the first one makes."""
    config = {"parallel": {"data": data}}
    return [halfmesh.initialize(nn.Linear(4, 4), torch.optim.Adam, config=config, device="cpu") for _ in range(2)]


def close_two_engines(rank, world_size, port):
    os.environ.update(TORCHRUN, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    for data, order in (("zero1", 1), ("fsdp", -1)):
        engines = make_two(data)[::order]
        for engine in engines:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            engine.close()
            engine.close()  # not counted twice
            assert dist.is_initialized() == (engine is engines[0])

    engines = make_two()
    with suppress(LookupError), engines[0]:
        raise LookupError
    assert dist.is_initialized(), "an error is on its way out"
    for engine in reversed(engines):
        engine.close()
    assert not dist.is_initialized()

    first, second = make_two()
    second.close()
    with pytest.raises(InputError, match="different configs"):
        halfmesh.initialize(nn.Linear(4, 4), torch.optim.SGD, config={"seed": rank}, device="cpu")
    first.close()
    assert not dist.is_initialized()


@pytest.mark.distributed
def test_a_group_ends_with_the_last_engine_that_uses_it():
    run_ranks(close_two_engines, 2, free_port(), init=False)
