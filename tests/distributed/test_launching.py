"""What each launch function reads, makes and rejects, and who ends the process group."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from contextlib import nullcontext, suppress
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.config.load import load_config
from halfmesh.distributed import process_group
from halfmesh.distributed.env import ProcessEnv, RankNames, list_ranks, ranks_by_value
from halfmesh.distributed.local_ranks import free_port
from halfmesh.engine import launch as launching
from halfmesh.engine.launch import (
    choose_device,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from halfmesh.errors import InputError, LaunchError
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def _fresh_environment(monkeypatch):
    """No launcher's variables, and the generators' states as before afterwards."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def variables(monkeypatch):
    """Sets variables of the environment; None removes one."""

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


def test_python_train_py_is_a_launch_of_one(tmp_path):
    (tmp_path / "config.py").write_text("seed = 11\nNUM_EPOCHS = 3\n")
    hook = sys.excepthook
    with launch_from_torch(str(tmp_path / "config.py"), device="cpu") as run:
        assert (run.rank, run.world_size, run.local_rank, run.device) == (0, 1, 0, CPU)
        assert (run.config.seed, run.config.NUM_EPOCHS) == (11, 3)
        assert run.group is None
        assert not dist.is_initialized()
        assert sys.excepthook is hook


@pytest.mark.parametrize(("argument", "expected"), [(None, 5), (6, 6)])
def test_seeds_of_python_numpy_and_torch(argument, expected):
    launch_from_torch({"seed": 5}, seed=argument, device="cpu")
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
    random.seed(expected)
    np.random.seed(expected)
    torch.manual_seed(expected)
    assert drawn == (random.random(), float(np.random.rand()), torch.rand(1).item())


@pytest.mark.promise("launchers", "torchrun, SLURM, Open MPI", of="Colossal-AI", page="loop.md")
def test_slurm_and_open_mpi_tell_the_place(variables, monkeypatch):
    variables(SLURM)
    assert launch_from_slurm({}, "host", 1, device="cpu").world_size == 1
    variables(OPENMPI)
    assert launch_from_openmpi({}, "host", 1, device="cpu").world_size == 1
    joined = []
    monkeypatch.setattr(launching, "make_group", lambda place, *rest: joined.append(place))
    variables(SLURM, SLURM_NPROCS=None, SLURM_NTASKS="8", SLURM_PROCID="5", SLURM_LOCALID="1")
    run = launch_from_slurm({}, "host", 1, device="cpu", verbose=False)
    assert (run.rank, run.world_size, run.local_rank) == (5, 8, 1)
    assert len(joined) == 1


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"tensor": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"tensor": 2, "pipeline": {"size": 2, "microbatches": 2}}, [0, 0, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_data_ranks_are_known_before_there_is_a_model(parallel, expected, variables, monkeypatch):
    monkeypatch.setattr(launching, "make_group", lambda *given: None)
    found = []
    for rank in range(8):
        variables(TORCHRUN, WORLD_SIZE="8", RANK=str(rank))
        run = launch_from_torch({"parallel": parallel}, device="cpu", verbose=False)
        found.append(run.dp_rank)
        assert run.dp_size == max(expected) + 1
    assert found == expected


@pytest.mark.promise("launchers")
def test_the_default_parser():
    line = "--config c.py --host h --port 5 --world-size 4 --rank 1 --local-rank 1 --backend gloo"
    expected = {"config": "c.py", "host": "h", "port": 5, "world_size": 4, "rank": 1, "local_rank": 1}
    parser = get_default_parser()
    assert vars(parser.parse_args(line.split())) == expected | {"backend": "gloo", "overrides": []}
    underscored = line.replace("world-size", "world_size").replace("local-rank", "local_rank")
    assert vars(parser.parse_args(underscored.split())) == expected | {"backend": "gloo", "overrides": []}
    nothing = vars(parser.parse_args([]))
    assert nothing.pop("overrides") == []
    assert set(nothing.values()) == {None}


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (RankNames(8), "rank 5"),
        (RankNames(8, {"pp": 1, "dp": 8, "tp": 1}), "rank 5"),
        (RankNames(8, {"pp": 1, "dp": 2, "tp": 3}), "rank 5"),  # sizes that do not fit
        (RankNames(8, {"pp": 1, "dp": 4, "tp": 2}), "rank 5 (dp 2, tp 1)"),
        (RankNames(8, {"pp": 2, "dp": 2, "tp": 2}), "rank 5 (pp 1, dp 0, tp 1)"),
    ],
)
def test_messages_name_a_rank_by_its_place_in_the_mesh(names, name):
    assert names.name(5) == name


def test_names_of_several_ranks():
    names = RankNames(8, {"pp": 1, "dp": 4, "tp": 2})
    assert names.names([5, 0]) == "rank 0 (dp 0, tp 0), rank 5 (dp 2, tp 1)"
    assert names.names(range(7)) == "ranks 0-6"
    assert RankNames(8).names([7, 3, 2, 1, 0]) == "ranks 0-3, 7"
    assert RankNames(8).names([4, 5, 7]) == "ranks 4, 5, 7"
    assert list_ranks(range(1024)) == "ranks 0-1023"
    assert list_ranks(range(3, 1024, 8)) == "ranks 3-1019 in steps of 8"
    assert list_ranks([1, 3, 5]) == "ranks 1, 3, 5"
    assert list_ranks(rank for rank in range(1024) if rank % 8 > 1) == (
        "ranks 2-7, 10-15, 18-23, 26-31, 34-39, 42-47, 50-55, 58-63 and 720 more"
    )
    assert ranks_by_value(dict(enumerate("abac"))) == {"a": [0, 2], "b": [1], "c": [3]}
    assert RankNames(8).names([3]) == "rank 3"


# --- devices ----------------------------------------------------------------------------------------------------------


def test_each_local_rank_gets_its_gpu(monkeypatch):
    current = pretend_gpus(monkeypatch, 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == torch.device("cuda:3")
    assert choose_device("cuda", 2) == torch.device("cuda:2")
    assert choose_device("cuda:1", 2) == torch.device("cuda:1")
    assert choose_device("cpu", 2) == CPU
    assert current == [3, 2, 1]


def test_one_visible_gpu_is_taken_whatever_the_local_rank(monkeypatch):
    """As under srun --gpus-per-task=1."""
    pretend_gpus(monkeypatch, 1)
    assert choose_device(None, 3) == choose_device("cuda", 3) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("gpus", "device", "message"),
    [
        (2, None, r"local rank 2 needs GPU 2, but this process sees 2 .* at most 2 ranks .* device='cpu'"),
        (2, "cuda:7", r"device='cuda:7' needs GPU 7, but this process sees 2"),
        (0, "cuda", r"local rank 2 needs GPU 2, but this process sees 0 .* device='cpu'"),
    ],
)
def test_devices_that_do_not_exist(monkeypatch, gpus, device, message):
    pretend_gpus(monkeypatch, gpus)
    with pytest.raises(LaunchError, match=message):
        choose_device(device, 2)


def test_what_is_offloaded_needs_a_backend_of_the_host_too(monkeypatch):
    offloaded = load_config({"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}})
    pretend_gpus(monkeypatch, 1)
    asked = []
    monkeypatch.setattr(launching, "make_group", lambda *args: asked.append(args[4]))
    for config, backend in ((offloaded, None), (offloaded, "nccl"), ({}, None)):
        launch(config, 0, 1, "localhost", 1, backend=backend)
    assert asked == ["cpu:gloo,cuda:nccl", "nccl", None]


# --- rejections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"RANK": None},
            r"^RANK is missing .* launch_from_torch\(config\) expects .* torchrun --nproc-per-node N train.py",
        ),
        ({"RANK": "first"}, r"^RANK is 'first' in the environment: launch_from_torch\(config\) expects a whole number"),
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
    message = rf"{variable}=4: .* would train alone; call {function}\("
    with pytest.raises(LaunchError, match=message):
        launch_from_torch({}, device="cpu")
    with pytest.raises(LaunchError, match=message):
        halfmesh.initialize(nn.Linear(2, 2), torch.optim.SGD, config={}, device="cpu")


def test_peers_that_never_come_and_a_port_in_use():
    with pytest.raises(LaunchError, match=r"rank 0 of 2 could not join .* Start all 2 processes"):
        launch({"timeout": 1.0}, 0, 2, "127.0.0.1", free_port(), device="cpu")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"rank 0 of 2 could not join .* at 127.0.0.1:{port} within 1 s"):
            launch({"timeout": 1.0}, 0, 2, "127.0.0.1", port, device="cpu")
    assert not dist.is_initialized()


# --- two processes ----------------------------------------------------------------------------------------------------


def set_place(rank, world_size, port):
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**values, "MASTER_PORT": port}.items()})


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
        assert sys.excepthook is not guard
        assert not dist.is_initialized()
    with pytest.raises(LookupError), launch({}, rank, world_size, "127.0.0.1", port, device="cpu"):
        raise LookupError
    assert dist.is_initialized(), "it is on its way out, and the other rank has to hear of it"
    return weights


@pytest.mark.distributed
def test_launch_joins_seeds_alike_and_cleans_up():
    first, second = run_ranks(use_launch, 2, free_port(), init=False, fresh=True)
    assert first == second


def use_torchrun_variables(rank, world_size, port):
    set_place(rank, world_size, port)
    with launch_from_torch({"timeout": 30.0}, device="cpu") as run:
        facts = [run.rank, run.world_size, dist.get_world_size()]
        halfmesh.initialize(nn.Linear(4, 4), torch.optim.SGD, config=run).close()
        facts.append(dist.is_initialized())  # it is the launch's
    return [*facts, dist.is_initialized()]


@pytest.mark.distributed
def test_torchruns_variables_make_a_group_that_the_owner_destroys():
    expected = [[rank, 2, 2, True, False] for rank in range(2)]
    assert run_ranks(use_torchrun_variables, 2, free_port(), init=False) == expected


def use_existing(rank, world_size):
    run = launch({}, rank, world_size, "ignored", 1, device="cpu")
    run.close()
    assert (run.group, dist.is_initialized()) == (None, True)
    assert launch_from_torch({}, device="cpu").rank == rank


@pytest.mark.distributed
def test_an_existing_group_is_used_and_left_alone():
    run_ranks(use_existing, 2)


def make_two(data="replicate"):
    """Two engines, which share a group that the first one makes."""
    config = {"parallel": {"data": data}}
    return [halfmesh.initialize(nn.Linear(4, 4), torch.optim.Adam, config=config, device="cpu") for _ in range(2)]


def close_two_engines(rank, world_size, port):
    set_place(rank, world_size, port)
    for data in ("zero1", "fsdp"):
        for order in (1, -1):
            engines = make_two(data)[::order]
            for engine in engines:
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
                engine.close()
                engine.close()  # not counted twice
                assert dist.is_initialized() == (engine is engines[0])

    for with_errors in (1, 2):
        engines = make_two()
        for engine in engines[:with_errors]:
            with suppress(LookupError), engine:
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


ONE_AFTER_THE_OTHER = """
import torch
import halfmesh

for number in range(4):
    model = torch.nn.Linear(4, 4)
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config={}, device="cpu")
    for _ in range(2):
        engine.backward(engine(torch.full((2, 4), float(engine.context.rank))).sum())
        engine.step()
    same = engine.context.everyone(model.bias.tolist())
    assert same[0] == same[1]
    engine.close()
    assert not torch.distributed.is_initialized()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_engines_one_after_the_other(tmp_path):
    """Each makes a process group, in the store that torchrun keeps."""
    script = tmp_path / "train.py"
    script.write_text(ONE_AFTER_THE_OTHER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_offloading_needs_a_group_that_also_sends_from_the_host(monkeypatch):
    config = load_config({"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}})
    device = torch.device("cuda", 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for there in ("cpu:gloo,cuda:nccl", "cuda:nccl"):
        monkeypatch.setattr(dist, "get_backend_config", lambda config=there: config)
        rejected = pytest.raises(LaunchError, match=r"create it with init_process_group\('cpu:gloo,cuda:nccl'\)")
        with rejected if there == "cuda:nccl" else nullcontext():
            launching.ensure_process_group(config, device, RankNames(1), False)


RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@pytest.mark.parametrize(
    ("given", "backend", "written", "said"),
    [
        ({}, "nccl", "HERE/nccl_trace_rank_", "HERE/nccl_trace_rank_"),
        ({}, "cpu:gloo,cuda:nccl", "HERE/nccl_trace_rank_", "HERE/nccl_trace_rank_"),
        ({}, "gloo", None, ""),
        ({RECORDS[0]: "/mine_"}, "nccl", "/mine_", "/mine_"),
        ({RECORDS[1]: "/mine_"}, "nccl", None, "/mine_"),
        ({RECORDER[1]: "0"}, "nccl", None, ""),
        ({RECORDER[2]: "0"}, "nccl", None, ""),
    ],
)
def test_where_nccls_flight_recorder_writes(given, backend, written, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (*RECORDER, *RECORDS):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    watches = []
    monkeypatch.setattr(process_group, "_make_store", MagicMock())
    monkeypatch.setattr(process_group.dist, "PrefixStore", MagicMock())
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(process_group, "FailureWatch", lambda *args: watches.append(args) or MagicMock())
    place = process_group.Address("localhost", 1)
    process_group.make_group(ProcessEnv(0, 2, 0), place, torch.device("cpu"), 5, backend, RankNames(2))
    here = str(tmp_path)
    assert watches[0][-1] == said.replace("HERE", here)
    assert os.environ.get(RECORDS[0]) == (written and written.replace("HERE", here))
    assert {name: os.environ.get(name) for name in given} == given
    expected = {RECORDER[2]: "1"} if said else {}
    assert {name: os.environ[name] for name in RECORDER if name in os.environ and name not in given} == expected
