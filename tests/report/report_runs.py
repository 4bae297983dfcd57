"""Folders of runs that nobody has trained, and what the report says of them."""

import json
import math
import tempfile
from pathlib import Path

from typer.testing import CliRunner

import halfmesh
from halfmesh.cli import app


def make_config(**changes):
    """As RunFolder writes it."""
    session = {
        "started": "2026-01-02T03:04:05+00:00",
        "ended": "2026-01-02T04:05:06+00:00",
        "status": "finished",
        "from_step": 0,
        "to_step": 400,
        "argv": ["train.py", "--config", "config.py"],
        "versions": {"python": "3.11.7", "torch": "2.15.0", "cuda": "13.0", "halfmesh": "0.1.0"},
        "device": "NVIDIA H200",
        "world_size": 8,
        "config": {"fp16": {"mode": "naive", "initial_scale": 65536.0}, "NUM_EPOCHS": 3},
        "settings": {"fp16": {"mode": "naive", "initial_scale": 65536.0, "hysteresis": 2}, "bf16": None},
    }
    return {"format": 1, "sessions": [session | changes]}


def make_plan(pp=2, dp=2, tp=2, size=3 * 2**30):
    """The same of a mesh."""
    rows = {"precision": "mode naive, compute float16", "layout": f"pp {pp} x dp {dp} x tp {tp} on cuda"}
    ranks = []
    for rank in range(pp * dp * tp):
        stage, tensor = rank // (dp * tp), rank % tp
        holds = [f"blocks.{6 * stage}-{6 * stage + 5}", "a_module_with_a_long_name" if stage else "embedding"]
        ranks.append({"holds": holds, "part": f"tensor {tensor + 1}/{tp}", "bytes": size})
    adamw = {"type": "AdamW", "lr": 0.001, "betas": [0.9, 0.95], "amsgrad": False}
    values = {"mode": "naive", "mesh": {"pp": pp, "dp": dp, "tp": tp}, "ranks": ranks, "optimizer": [adamw]}
    return {"format": 1, "plans": [{"from_step": 0, "rows": rows, "values": values}]}


def make_records(steps=400, every=10, skipped=(3, 4, 57, 200, 201, 202)):
    """Of training and evaluation."""
    scale, records, count = 65536.0, [], 0
    for step in range(every, steps + 1, every):
        new = [number for number in range(step - every + 1, step + 1) if number in skipped]
        count += len(new)
        scale = max(1.0, scale / 2 ** len(new)) if new else scale * (2 if step % (20 * every) == 0 else 1)
        record = {
            "step": step,
            "epoch": step * 4 // steps,
            "loss": None if step == 20 * every else 2.5 * math.exp(-3 * step / steps) + 0.1 * math.sin(step),
            "lr": 1e-3 * (1 - step / steps),
            "grad_norm": None if new else 1 + 0.8 * math.sin(step / 7),
            "loss_scale": scale,
            "skipped_steps": count,
            "samples_per_s": 12000 + 900 * math.sin(step / 5),
            "memory_mib": 7000 + step / steps * 30,
        }
        records.append(record | ({"skipped": new} if new else {}))
        if step % (steps // 4) == 0:
            records.append({"step": step, "epoch": step * 4 // steps, "eval_loss": 2.4 * math.exp(-3 * step / steps)})
    return records


FINDING = "more than 5% of the gradients of blocks.1 are lost to zero"
PRECISION = {"format": 1, "step": 400, "report": {"compute_dtype": "float16", "findings": [FINDING]}}


def write_run(folder, config=None, plan=None, records=None, precision=PRECISION):
    """A whole run in `folder`, or what is given."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(make_config() if config is None else config))
    (folder / "plan.json").write_text(json.dumps(make_plan() if plan is None else plan))
    lines = [json.dumps(record) for record in (make_records() if records is None else records)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if precision is not None:
        (folder / "precision.json").write_text(json.dumps(precision))
    return folder


def page_of(*folders):
    """The page about runs, as text."""
    with tempfile.TemporaryDirectory() as place:
        return halfmesh.write_report(*folders, out=Path(place) / "report.html").read_text()


def data_of(folder):
    """What `halfmesh report --json` says of a run."""
    done = CliRunner().invoke(app, ["report", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    assert "NaN" not in done.stdout
    (run,) = json.loads(done.stdout)["runs"]
    return run
