"""A program that trains with automatic saves; tests start it, tell it to end, kill it, and start it again.

It writes a line for each step into a file of its rank: "<step> <time>", and "from <step>" at its start.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

DEFAULTS = {"folder": None, "every": 4, "dropout": 0.3, "shuffle": True, "workers": 0, "pause": 0.0, "epochs": 3}
DEFAULTS["log"] = None
"""`folder`: of checkpoints; None: no saves. `pause`: seconds after each step. `log`: folder of the steps' files."""


def main(out, **options):
    """Train; the weights go to the file `out` in the end. Returns step and loss of each step."""
    given = {**DEFAULTS, **options}
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(given["dropout"]), nn.Linear(32, 4))
    x = torch.randn(96, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    is_joined = torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if is_joined else int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(data, 8 // ranks, shuffle=given["shuffle"], num_workers=given["workers"])
    saves = {"directory": given["folder"], "every": given["every"], "keep": 2, "signals": ["SIGTERM"]}
    engine = halfmesh.initialize(
        model,
        lambda params: torch.optim.AdamW(params, lr=0.01),
        nn.functional.cross_entropy,
        loader,
        {} if given["folder"] is None else {"checkpoint": saves, "resume": "auto"},
        device="cpu",
    )
    log, rank = given["log"], engine.context.rank
    if log is not None:
        Path(log, f"pid-{rank}").write_text(str(os.getpid()))
    seen = []
    with open(os.devnull if log is None else f"{log}/rank-{rank}", "a", buffering=1) as file:
        file.write(f"from {engine.global_step}\n")
        for _ in range(engine.dataloader.next_epoch, given["epochs"]):
            for inputs, targets in engine.dataloader:
                engine.zero_grad()
                loss = engine.criterion(engine(inputs), targets)
                engine.backward(loss)
                engine.step()
                seen.append((engine.global_step, loss.item()))
                file.write(f"{engine.global_step} {time.monotonic()}\n")
                time.sleep(given["pause"])
    weights = engine.full_state_dict()
    engine.close()
    if rank == 0:
        torch.save(weights, out)
    return seen


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
