"""Two nodes: two network namespaces with host names, addresses and processes of their own, joined by a cable (veth).

On each of them a command of docs/nodes.md starts two ranks of a 2 x 2 mesh. A node that is unplugged answers nothing,
as after a power cut.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfmesh.checkpoint.storage import LOCK
from halfmesh.distributed.local_ranks import LAUNCH_VARIABLES
from tests.support.pages import read_page

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]

LATEST_S = 100.0  # until ranks have started, or ended; on an idle machine it is 15
CONFIG = """
parallel = dict(tensor=dict(size=2, plan={"0": "colwise", "2": "rowwise"}))
checkpoint = dict(directory="checkpoints", every=5)
resume = "auto"
timeout = 5.0
EPOCHS, HALTS = 3, None
"""
TRAIN = """
import os, pathlib, time
import torch
import halfmesh
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pathlib.Path("here-" + os.environ["RANK"]).touch()
while len(list(pathlib.Path().glob("here-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)  # so that the config's timeout is not that of imports
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 8))
args = halfmesh.get_default_parser().parse_args()
with halfmesh.launch_from_torch(halfmesh.load_config(args.config, overrides=args.overrides), device="cpu") as launch:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, 64 // launch.dp_size)
    with halfmesh.initialize(model, optimizer, nn.functional.mse_loss, loader, launch) as engine:
        print("begins at", engine.global_step, flush=True)
        for _ in range(engine.dataloader.next_epoch, launch.config.EPOCHS):
            for x, y in engine.dataloader:
                engine.zero_grad()
                loss = engine.criterion(engine(x), y)
                engine.backward(loss)
                engine.step()
                if engine.global_step == 7 and launch.rank // 2 == launch.config.HALTS:
                    print("halts", flush=True)
                    time.sleep(1000)
"""


class Nodes:
    """node0 and node1, which are one cable apart. OSError: this machine makes no namespaces, or lacks the programs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()

    def connect(self) -> None:
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
        outside = self._enter(self._hold("unshare --user --map-root-user --mount --net"))
        unshare = f"{outside} unshare --net --uts --mount --pid --fork --kill-child"
        begin = "hostname node{} && mount --bind hosts /etc/hosts && "
        firsts = [self._hold(unshare, begin.format(number)) for number in range(2)]
        cable = [f"name cable netns {first}" for first in firsts]
        self._call(f"{outside} ip link add {cable[0]} type veth peer {cable[1]}")
        self._inside = [self._enter(first) + " -u -p" for first in firsts]
        for number, inside in enumerate(self._inside):
            for interface in ("lo", "cable"):
                self._call(f"{inside} ip link set {interface} up")
            # Not on the cable, which goes when the other node goes.
            self._call(f"{inside} ip address add 10.77.0.{number + 1} dev lo")
            self._call(f"{inside} ip route add 10.77.0.0/24 dev cable")

    def start(self, number: int, command: str) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        words = [*self._inside[number].split(), sys.executable, "-m", *command.split()]
        with open(self._folder / f"said-{number}", "w") as output:
            process = subprocess.Popen(words, env=environment, cwd=self._folder, stdout=output, stderr=output)
        self._processes.append(process)
        return process

    def said(self, number: int) -> str:
        return (self._folder / f"said-{number}").read_text()

    def unplug(self, number: int) -> None:
        self._call(f"{self._inside[number]} ip link set cable down")

    def close(self) -> None:
        for process in self._processes:  # a node ends before what it runs is waited for
            process.kill()
            process.communicate()

    def _hold(self, command: str, begin: str = "") -> int:
        """The id of a process that stays in new namespaces until the end."""
        script = begin + "read id rest < /proc/self/stat && echo $id && exec sleep 1000"
        pipe, words = subprocess.PIPE, [*command.split(), "sh", "-c", script]
        process = subprocess.Popen(words, cwd=self._folder, stdout=pipe, stderr=pipe)
        self._processes.append(process)
        assert process.stdout is not None
        if not (said := process.stdout.readline()):
            raise OSError(process.communicate()[1].decode().strip())
        return int(said)

    @staticmethod
    def _enter(process: int) -> str:
        return f"nsenter --preserve-credentials -t {process} -U -m -n -w"

    @staticmethod
    def _call(command: str) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr.strip())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes that share a folder with the program and its config."""
    for name, text in {"train.py": TRAIN, "config.py": CONFIG}.items():
        (tmp_path / name).write_text(text)
    found = Nodes(tmp_path)
    try:
        found.connect()
        yield found
    except OSError as error:
        pytest.skip(f"two nodes need network namespaces: {error}")
    finally:
        found.close()


def command(begin: str, *options: str) -> str:
    """The line of docs/nodes.md that begins so, with two CPU ranks for the eight GPUs of a node."""
    (line,) = re.findall(rf"^\|.*\| `({begin}[^`]*)` \|$", read_page("nodes.md"), re.MULTILINE)
    line = line.replace("torchrun", "torch.distributed.run").replace("--nproc-per-node 8", "--nproc-per-node 2")
    line = line.replace("--nproc 8", "--nproc 2 --device cpu")
    return " ".join([line.removesuffix(" --config config.py"), "--config config.py", *options])


def wait(nodes: Nodes, ready: Callable[[], object]) -> None:
    end = time.monotonic() + LATEST_S
    while not ready():
        assert time.monotonic() < end, "\n".join(map(nodes.said, range(2)))
        time.sleep(0.05)


@pytest.mark.promise("a rank that fails or hangs", "all ranks end, and name it", of="PyTorch", page="nodes.md")
def test_a_node_without_power_is_named_and_the_other_goes_on_from_the_checkpoint(nodes, tmp_path):
    """None of its addresses answers, and it keeps what ranks talk through; torchrun waits for it longer than they."""
    started = [nodes.start(number, command("halfmesh run --nnodes 2", "--set HALTS=0")) for number in range(2)]
    wait(nodes, lambda: nodes.said(0).count("halts") == 2 and (tmp_path / "checkpoints/step-00000005").exists())
    nodes.unplug(0)
    for rank in (2, 3):
        words = f"[rank {rank} (dp 1, tp {rank - 2})] no answer from the launcher on node0, which hosts the store"
        wait(nodes, lambda words=words: words in nodes.said(1))
    started[1].kill()
    (tmp_path / "checkpoints" / LOCK).unlink()  # as the message about it says, "if its machine is gone"
    alone = nodes.start(1, command("torchrun --standalone"))
    wait(nodes, lambda: alone.poll() is not None)
    assert alone.returncode == 0, nodes.said(1)
    assert nodes.said(1).count("begins at 5") == 2
