"""The most host memory that a rank needs until the engine stands: of an ordinary build, and of deferred ones.

python -m benchmarks.deferred_memory [--millions 400] [--out benchmarks/results/deferred_memory.md]
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import halfmesh

_METHOD = """Each rank is a process of its own. *more* is how far its resident memory rose above what it was before the
model was built (`ru_maxrss`, so what was freed again counts, too); *held* is what is left of that at the end; both in
units of the whole model in fp32. malloc gives freed memory back at once (MALLOC_MMAP_THRESHOLD_=65536). Seconds are
those of a machine that had other work, too."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp 2": (2, {"data": "fsdp"}),
    "pp 2": (2, {"pipeline": {"size": 2, "microbatches": 2}}),
    "pp 2 x fsdp 2": (4, {"pipeline": {"size": 2, "microbatches": 2}, "data": "fsdp"}),
}
BUILDS = ("ordinary", "deferred", "from rank 0")


def make_model(millions: int) -> nn.Sequential:
    """Layers of 4 million parameters."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(millions // 4)))


def _measure(rank: int, world_size: int, folder: str, layout: str, build: str, millions: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("halfmesh").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    config = {"parallel": LAYOUTS[layout][1]}
    with halfmesh.initialize(make_model(16), torch.optim.AdamW, nn.MSELoss(), config=config, device="cpu"):
        pass  # what is imported then is not the model's
    before, start = _resident(), time.perf_counter()
    if build == "from rank 0":
        with halfmesh.deferred_init(from_rank0=True):
            model: Any = make_model(millions)
    else:
        model = make_model(millions) if build == "ordinary" else lambda: make_model(millions)
    engine = halfmesh.initialize(model, torch.optim.AdamW, nn.MSELoss(), config=config, device="cpu")
    took, most = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del model
    whole = 4 * sum(p.numel() for p in make_shapes(millions).parameters())
    Path(folder, f"{rank}").write_text(f"{(most - before) / whole} {(_resident() - before) / whole} {took}")
    dist.barrier()
    del engine
    dist.destroy_process_group()


def make_shapes(millions: int) -> nn.Module:
    """`make_model` without memory."""
    with torch.device("meta"):
        return make_model(millions)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _row(layout: str, build: str, millions: int) -> str:
    world_size = LAYOUTS[layout][0]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, (world_size, folder, layout, build, millions), nprocs=world_size)
        ranks = [list(map(float, Path(folder, f"{rank}").read_text().split())) for rank in range(world_size)]
    more = [most for most, _, _ in ranks]
    held = [kept for _, kept, _ in ranks]
    others = f"{max(more[1:]):.2f}"
    return (
        f"| {layout} | {build} | {more[0]:.2f} | {others} | {max(held):.2f} | {max(took for _, _, took in ranks):.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--millions", type=int, default=400, help="parameters of the model")
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the ranks: or it keeps what tensors gave back
    lines = [
        "# Host memory until the engine stands",
        "",
        f"{chosen.millions} million parameters in fp32; {platform.processor() or platform.machine()}, torch "
        f"{torch.__version__}, {datetime.date.today()}. Made by `python -m benchmarks.deferred_memory`.",
        "",
        *_METHOD.splitlines(),
        "",
        "| layout | build | more, rank 0 | more, other ranks | held | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        for build in BUILDS:
            lines.append(_row(layout, build, chosen.millions))
            print(lines[-1], flush=True)
    if chosen.out:
        chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
