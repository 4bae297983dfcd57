"""What each launch function reads, makes and refuses."""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh import launchers, launching, process_group
from halfmesh.config.load import load_config
from halfmesh.errors import InputError, LaunchError
from halfmesh.launchers import Place
from halfmesh.launching import (
    choose_backend,
    choose_device,
    ensure_process_group,
    find_group_problem,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from halfmesh.layout import Layout
from tests.support.ranks import free_port, run_ranks

CPU = torch.device("cpu")
TORCHRUN_VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29999",
}
SLURM_VARIABLES = {"SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0"}
OPENMPI_VARIABLES = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.fixture(autouse=True)
def _fresh_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, and the generators' states as before afterwards."""
    for name in list(os.environ):
        if name in TORCHRUN_VARIABLES or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **changes: str | None) -> None:
    for name, value in {**variables, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Let torch report `count` GPUs; the list gets the devices that are made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


# ---- one process


def test_python_train_py_is_a_launch_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    hook = sys.excepthook
    with launch_from_torch({"seed": 7}, device="cpu") as run:
        assert (run.rank, run.world_size, run.local_rank, run.device) == (0, 1, 0, CPU)
        assert run.config.seed == 7
        assert run.group is None
        assert not dist.is_initialized()
        assert sys.excepthook is hook
    run.close()


def test_a_launch_cannot_be_changed() -> None:
    run = launch_from_torch({}, device="cpu")
    with pytest.raises(AttributeError):
        run.rank = 3  # type: ignore[misc]


def test_a_config_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text("seed = 11\nNUM_EPOCHS = 3\n")
    assert launch(str(path), 0, 1, "localhost", 1, device="cpu").config.seed == 11


@pytest.mark.parametrize(("argument", "expected"), [(None, 5), (6, 6)])
def test_seeds_of_python_numpy_and_torch(argument: int | None, expected: int) -> None:
    launch_from_torch({"seed": 5}, seed=argument, device="cpu")
    drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
    random.seed(expected)
    np.random.seed(expected)
    torch.manual_seed(expected)
    assert drawn == (random.random(), float(np.random.rand()), torch.rand(1).item())


@pytest.mark.parametrize("verbose", [True, False])
def test_it_says_what_it_made(verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
    launch_from_torch({"seed": 5}, device="cpu", verbose=verbose)
    said = ["world of 1 (no process group), device cpu, seed 5"]
    assert [record.getMessage() for record in caplog.records] == (said if verbose else [])


def test_slurm_and_open_mpi_tell_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, SLURM_VARIABLES)
    assert launch_from_slurm({}, "host", 1, device="cpu").world_size == 1
    set_variables(
        monkeypatch, SLURM_VARIABLES, SLURM_NPROCS=None, SLURM_NTASKS="8", SLURM_PROCID="5", SLURM_LOCALID="1"
    )
    assert launchers.read_place(launchers.SLURM) == launchers.Place(rank=5, world_size=8, local_rank=1)
    set_variables(monkeypatch, OPENMPI_VARIABLES)
    assert launch_from_openmpi({}, "host", 1, device="cpu").world_size == 1


# ---- what a guard knows of the mesh


def test_the_degrees_of_the_config_name_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[Any] = []
    monkeypatch.setattr(launching, "make_group", lambda *arguments: layouts.append(arguments[-1]))
    config = {"parallel": {"tensor": 2, "pipeline": 3}}
    launch(config, 0, 12, "host", 1, device="cpu")
    set_variables(monkeypatch, TORCHRUN_VARIABLES, WORLD_SIZE="12")
    launch_from_torch(config, device="cpu")
    ensure_process_group(CPU, 60, pipeline=3, tensor=2)
    assert layouts == [Layout(12, pipeline=3, tensor=2)] * 3
    ensure_process_group(CPU, 60)
    assert layouts[3] == Layout(12)


def test_who_keeps_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not process_group._agent_hosts_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert process_group._agent_hosts_store()


def test_ranks_that_torchrun_has_started_again_find_nothing_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps the store on one machine; agents of several count restarts differently."""
    agent = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "RANK": "1",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)

    def store(restarts: str, machines: str, groups_before: int = 0) -> dist.Store:
        monkeypatch.setattr(process_group, "_numbers", itertools.count(groups_before))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
        return process_group._make_store(Place(1, 2, 1), None, timedelta(seconds=10))

    first = store("0", "1")
    first.set("address", "of rank 0")
    assert store("0", "1").check(["address"])
    assert not store("1", "1").check(["address"])
    assert not store("0", "1", groups_before=1).check(["address"])
    store("0", "2").set("address", "of rank 0")
    assert store("1", "2").check(["address"])
    assert not store("1", "2", groups_before=1).check(["address"])


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


@pytest.mark.distributed
def test_engines_one_after_the_other_under_torchrun(tmp_path: Path) -> None:
    """Each makes a process group, in the store that torchrun keeps."""
    script = tmp_path / "train.py"
    script.write_text(ONE_AFTER_THE_OTHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.distributed
def test_engines_one_after_the_other_where_rank_0_keeps_the_store(tmp_path: Path) -> None:
    """As under srun or mpirun: without torchrun's store."""
    script = tmp_path / "train.py"
    script.write_text(ONE_AFTER_THE_OTHER)
    common = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said


def launched_again(rank: int, world_size: int, port: int) -> list[float]:
    sums = []
    for number in range(3):
        one = launch({}, rank, world_size, "127.0.0.1", port, device="cpu", verbose=False)
        value = torch.tensor(float(rank + number))
        dist.all_reduce(value)
        sums.append(value.item())
        one.close()
    return sums


@pytest.mark.distributed
def test_launches_one_after_the_other_at_the_same_address() -> None:
    assert run_ranks(launched_again, 2, free_port(), init=False, timeout=60) == [[1.0, 3.0, 5.0]] * 2


# ---- devices


def test_each_local_rank_gets_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend_gpus(monkeypatch, 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device() == torch.device("cuda:3")
    assert choose_device("cuda", 2) == torch.device("cuda:2")
    assert choose_device("cuda:1", 2) == torch.device("cuda:1")
    assert choose_device("cpu", 2) == CPU
    assert current == [3, 2, 1]


def test_without_local_rank_it_is_the_rank_modulo_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    places: list[Any] = []
    monkeypatch.setattr(launching, "_launch", lambda config, place, *rest: places.append(place))
    launch({}, 6, 8, "host", 1)
    pretend_gpus(monkeypatch, 0)
    launch({}, 6, 8, "host", 1)
    assert [place.local_rank for place in places] == [2, 6]


@pytest.mark.parametrize(
    ("gpus", "device", "message"),
    [
        (2, None, r"local rank 2 needs GPU 2, but this machine has 2 .* at most 2 process\(es\) .* device='cpu'"),
        (2, "cuda", r"local rank 2 needs GPU 2"),
        (2, "cuda:7", r"device='cuda:7' needs GPU 7, but this machine has 2"),
        (0, "cuda", r"device='cuda', but torch .* finds no CUDA device; give 'cpu'"),
        (0, "gpu", r"device='gpu' is no device of torch's; give 'cpu', 'cuda'"),
    ],
)
def test_devices_that_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str | None, message: str
) -> None:
    pretend_gpus(monkeypatch, gpus)
    with pytest.raises(LaunchError, match=message):
        choose_device(device, 2)


# ---- refusals


@pytest.mark.parametrize("missing", TORCHRUN_VARIABLES)
def test_some_but_not_all_of_torchruns_variables(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    set_variables(monkeypatch, TORCHRUN_VARIABLES, **{missing: None})
    with pytest.raises(LaunchError, match=rf"^{missing} missing .* torchrun --nproc-per-node N train.py"):
        launch_from_torch({}, device="cpu")


def test_slurm_and_open_mpi_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = r"^SLURM_PROCID, SLURM_NPROCS or SLURM_NTASKS, SLURM_LOCALID missing .* srun --ntasks N python train.py$"
    with pytest.raises(LaunchError, match=missing):
        launch_from_slurm({}, "host", 1)
    set_variables(monkeypatch, OPENMPI_VARIABLES, OMPI_COMM_WORLD_SIZE=None)
    with pytest.raises(LaunchError, match=r"^OMPI_COMM_WORLD_SIZE missing .* mpirun -np N python train.py$"):
        launch_from_openmpi({}, "host", 1)


def test_the_other_launcher_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, TORCHRUN_VARIABLES)
    with pytest.raises(LaunchError, match=r"looks like torchrun: use launch_from_torch\(config\)"):
        launch_from_slurm({}, "host", 1)


@pytest.mark.parametrize(
    ("variable", "function"),
    [("SLURM_STEP_NUM_TASKS", "launch_from_slurm"), ("OMPI_COMM_WORLD_SIZE", "launch_from_openmpi")],
)
def test_several_processes_never_train_alone_by_mistake(
    monkeypatch: pytest.MonkeyPatch, variable: str, function: str
) -> None:
    monkeypatch.setenv(variable, "4")
    message = rf"{variable}=4: .* would train alone; use {function}\("
    with pytest.raises(LaunchError, match=message):
        launch_from_torch({}, device="cpu")
    with pytest.raises(LaunchError, match=message):
        ensure_process_group(CPU, 60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "first"}, r"RANK='first' in the environment: expected a whole number of at least 0; .* unset"),
        ({"RANK": "-1"}, r"RANK='-1'"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE='0' in the environment: expected a whole number of at least 1"),
        ({"LOCAL_RANK": ""}, r"LOCAL_RANK=''"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            r"rank 2 of world size 2 \(RANK, WORLD_SIZE\) is impossible: ranks go from 0",
        ),
    ],
)
def test_values_that_cannot_be(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str) -> None:
    set_variables(monkeypatch, TORCHRUN_VARIABLES, **changes)
    with pytest.raises(LaunchError, match=message):
        launch_from_torch({}, device="cpu")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world(rank: int, world_size: int) -> None:
    with pytest.raises(LaunchError, match=f"rank {rank} of world size {world_size} is impossible"):
        launch({}, rank, world_size, "localhost", 1, device="cpu")


def test_a_negative_local_rank() -> None:
    with pytest.raises(LaunchError, match="local_rank=-1: expected"):
        launch({}, 0, 1, "localhost", 1, local_rank=-1, device="cpu")


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nccl", r"backend='nccl' works on CUDA devices only, but the device is cpu"),
        ("glooo", r"backend='glooo': this torch has no glooo; leave backend out"),
        ("cpu:gloo,cuda:ncl", r"this torch has no ncl;"),
    ],
)
def test_backends_that_cannot_be(backend: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch({}, 0, 2, "localhost", 1, backend=backend, device="cpu")


OFFLOADED = load_config({"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}})
CUDA = torch.device("cuda", 0)


def test_what_is_offloaded_needs_a_backend_of_the_host_too() -> None:
    assert choose_backend(OFFLOADED, CUDA) == "cpu:gloo,cuda:nccl"
    assert choose_backend(OFFLOADED, CPU) is None
    assert choose_backend(load_config({}), CUDA) is None


def test_launches_ask_for_that_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    asked = []
    monkeypatch.setattr(launching, "make_group", lambda *args: asked.append(args[4]))
    for backend in (None, "nccl"):
        launch(OFFLOADED, 0, 1, "localhost", 1, backend=backend)
    assert asked == ["cpu:gloo,cuda:nccl", "nccl"]


@pytest.mark.parametrize(
    ("backends", "refused"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", False), ("cpu:gloo,cuda:gloo", False)]
)
def test_a_group_that_cannot_reach_the_host(monkeypatch: pytest.MonkeyPatch, backends: str, refused: bool) -> None:
    assert find_group_problem(OFFLOADED, CUDA) is None, "there is no group"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    problem = find_group_problem(OFFLOADED, CUDA)
    assert (problem is not None) == refused
    if problem is not None:
        assert "no backend for tensors in host memory (cuda:nccl); make it with init_process_group(" in problem
    assert find_group_problem(load_config({}), CUDA) is None


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"rank 0 of 2 could not join .* at 127.0.0.1:{port} within 3 s"):
            launch({"timeout": 3.0}, 0, 2, "127.0.0.1", port, device="cpu")
    assert not dist.is_initialized()


def test_peers_that_never_come() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 of 2 could not join .* All 2 processes have to be started"):
        launch({"timeout": 1.0}, 0, 2, "127.0.0.1", free_port(), device="cpu")


# ---- two processes


def use_launch(rank: int, world_size: int, port: int) -> dict[str, Any]:
    hook = sys.excepthook
    with launch({"seed": 3, "timeout": 30.0}, rank, world_size, "127.0.0.1", port, device="cpu") as run:
        total = torch.tensor([float(run.rank)])
        dist.all_reduce(total)
        facts = {"sum": total.item(), "backend": dist.get_backend(), "weights": torch.nn.Linear(2, 2).weight.tolist()}
        guarded = sys.excepthook is not hook
    run.close()
    return {**facts, "guarded": guarded, "gone": not dist.is_initialized(), "local_rank": run.local_rank}


@pytest.mark.distributed
def test_launch_joins_seeds_alike_and_cleans_up() -> None:
    first, second = run_ranks(use_launch, 2, free_port(), init=False)
    assert first["sum"] == second["sum"] == 1.0
    assert first["backend"] == "gloo"
    assert first["weights"] == second["weights"]
    assert (first["guarded"], first["gone"]) == (True, True)
    assert (first["local_rank"], second["local_rank"]) == (0, 1)


def use_torchrun_variables(rank: int, world_size: int, port: int, second_port: int) -> list[Any]:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**values, "MASTER_PORT": port}.items()})
    with launch_from_torch({"timeout": 30.0}, device="cpu") as run:
        facts: list[Any] = [run.rank, run.world_size, dist.get_world_size()]
        facts.append(ensure_process_group(CPU, 30.0))  # there is one already: not the engine's to destroy
    facts.append(dist.is_initialized())
    os.environ["MASTER_PORT"] = str(second_port)  # the first may still be closing on rank 0
    group = ensure_process_group(CPU, 30.0)
    facts.append(dist.get_rank())
    assert group is not None
    group.close()
    group.close()
    return [*facts, dist.is_initialized()]


@pytest.mark.distributed
def test_torchruns_variables_make_a_group_that_the_owner_destroys() -> None:
    expected = [[rank, 2, 2, None, False, rank, False] for rank in range(2)]
    assert run_ranks(use_torchrun_variables, 2, free_port(), free_port(), init=False) == expected


ORDERS = ("in order", "reversed")


def _two_engines(data: str) -> tuple[Any, Any]:
    config = {"parallel": {"data": data}}
    first, second = (
        halfmesh.initialize(nn.Linear(4, 4), torch.optim.Adam, config=config, device="cpu") for _ in range(2)
    )
    return first, second


def close_two_engines(rank: int, world_size: int, port: int, second_port: int) -> dict[str, Any]:
    """Which of the calls leave a process group."""
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**values, "MASTER_PORT": port}.items()})
    facts: dict[str, Any] = {}
    for data in ("zero1", "fsdp"):
        for order in ORDERS:
            engines = _two_engines(data)[:: 1 if order == "in order" else -1]
            for engine in engines:
                engine.backward(engine(torch.ones(2, 4)).sum())
                engine.step()
            engines[0].close()
            engines[0].close()  # not counted twice
            facts[f"{data} {order}"] = [dist.is_initialized()]
            engines[1].backward(engines[1](torch.ones(2, 4)).sum())
            engines[1].step()
            engines[1].close()
            facts[f"{data} {order}"].append(dist.is_initialized())

    first, second = _two_engines("replicate")
    with suppress(LookupError), first:
        raise LookupError
    facts["one with an error"] = [dist.is_initialized()]
    second.close()
    facts["one with an error"].append(dist.is_initialized())
    first.close()

    first, second = _two_engines("replicate")
    for engine in (first, second):
        with suppress(LookupError), engine:
            raise LookupError
    facts["both with errors"] = [dist.is_initialized()]
    second.close()
    facts["both with errors"].append(dist.is_initialized())

    first, second = _two_engines("replicate")
    second.close()
    with pytest.raises(InputError, match="different configs"):
        halfmesh.initialize(nn.Linear(4, 4), torch.optim.SGD, config={"seed": rank}, device="cpu")
    first.close()
    facts["one refused"] = [dist.is_initialized()]

    first, second = _two_engines("replicate")
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{second_port}", rank=rank, world_size=world_size)
    is_left_alone = ensure_process_group(CPU, 30.0) is None
    facts["the user's own"] = [is_left_alone, dist.is_initialized()]
    dist.destroy_process_group()
    return facts


@pytest.mark.distributed
def test_a_group_ends_with_the_last_engine_that_uses_it() -> None:
    expected: dict[str, Any] = {f"{data} {order}": [True, False] for data in ("zero1", "fsdp") for order in ORDERS}
    expected |= {"one with an error": [True, False], "both with errors": [True, False], "one refused": [False]}
    expected["the user's own"] = [True, True]
    assert run_ranks(close_two_engines, 2, free_port(), free_port(), init=False, timeout=60) == [expected] * 2


def use_existing(rank: int, world_size: int) -> list[Any]:
    run = launch({}, rank, world_size, "ignored", 1, device="cpu")
    run.close()
    facts: list[Any] = [run.group, dist.is_initialized(), launch_from_torch({}, device="cpu").rank]
    try:
        launch({}, rank, world_size + 1, "ignored", 1, device="cpu")
    except LaunchError as error:
        facts.append(str(error))
    return facts


@pytest.mark.distributed
def test_an_existing_group_is_used_and_left_alone() -> None:
    for rank, (group, alive, own_rank, message) in enumerate(run_ranks(use_existing, 2)):
        assert (group, alive, own_rank) == (None, True, rank)
        assert f"as rank {rank} of 2, but the launch is for rank {rank} of 3" in message
        assert "destroy_process_group() first" in message


def leave_by_error(rank: int, world_size: int, port: int) -> tuple[bool, bool]:
    hook = sys.excepthook
    try:
        with launch({"timeout": 30.0}, rank, world_size, "127.0.0.1", port, device="cpu"):
            raise ValueError("x")
    except ValueError:
        return sys.excepthook is not hook, dist.is_initialized()


@pytest.mark.distributed
def test_an_error_on_its_way_out_still_meets_the_guard() -> None:
    assert run_ranks(leave_by_error, 2, free_port(), init=False) == [(True, True)] * 2


# ---- the command line


def test_parser() -> None:
    line = "--config c.py --host h --port 5 --world-size 4 --rank 1 --local-rank 1 --backend gloo"
    expected = {
        "config": "c.py",
        "host": "h",
        "port": 5,
        "world_size": 4,
        "rank": 1,
        "local_rank": 1,
        "backend": "gloo",
    }
    parser = get_default_parser()
    assert vars(parser.parse_args(line.split())) == expected
    underscored = line.replace("world-size", "world_size").replace("local-rank", "local_rank")
    assert vars(parser.parse_args(underscored.split())) == expected
    assert set(vars(parser.parse_args([])).values()) == {None}
    assert all(action.help for action in parser._actions)


# ---- the end of the process


def test_gloo_has_time_to_finish_before_python_shuts_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A thread of gloo that asks for Python during the shutdown aborts the process."""
    registered: list[Any] = []
    slept: list[float] = []
    monkeypatch.setattr(process_group.atexit, "register", registered.append)
    monkeypatch.setattr(process_group.time, "sleep", slept.append)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        launch_from_torch({}, device="cpu")
    finally:
        dist.destroy_process_group()
    assert registered.count(process_group.let_threads_finish) == 1
    process_group.let_threads_finish()
    assert slept == [process_group.PARTING_S]
    assert process_group.PARTING_S >= 0.05
