"""Other engines, where they are installed. Each is made to compute in the precision that it is asked for.

On a CPU accelerate changes fp16 to fp32 and Fabric changes it to bf16, without an error; fp16 is forced here.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist

from .contenders import Setup, adamw
from .harness import Contender

ACCELERATE = "accelerate"
FABRIC = "Lightning Fabric"
DEEPSPEED = "DeepSpeed"


def imported(name: str) -> Any:
    """The module. Environment variables that its import sets are unset: one of them
    (PYTORCH_NVML_BASED_CUDA_CHECK) slows down every optimizer where torch is built for CUDA and there is no GPU."""
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        for variable in os.environ.keys() - before.keys():
            del os.environ[variable]


def make_accelerate(setup: Setup, accumulation: int = 1) -> Contender:
    accelerate = imported("accelerate")
    alone = not dist.is_initialized()
    mixed = setup.precision if setup.dtype is not None else "no"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulation)
    if setup.precision == "fp16":  # before prepare(), which would leave out autocast and scaler on a CPU
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
    plain = setup.model()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    if not alone and accelerator.num_processes == 1:
        raise RuntimeError("it did not recognise the process group")
    x, y, criterion, clip = setup.x, setup.y, setup.work.criterion, setup.clip

    def step() -> torch.Tensor:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                loss = criterion(model(x), y)
                accelerator.backward(loss)
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def close() -> None:  # its settings belong to the process; the process group does not
        accelerate.state.AcceleratorState._reset_state(alone)
        accelerate.state.GradientState._reset_state()

    return Contender(ACCELERATE, step, model, optimizer.optimizer, close=close)


def make_fabric(setup: Setup) -> Contender:
    fabric_module = imported("lightning_fabric")
    options: dict[str, Any] = {"precision": {"fp32": "32-true", "bf16": "bf16-mixed"}.get(setup.precision)}
    if setup.precision == "fp16":
        precision = imported("lightning_fabric.plugins").MixedPrecision
        options = {"plugins": [precision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, **options)
    plain = setup.model()
    model, optimizer = fabric.setup(plain, adamw(plain))
    x, y, criterion, clip = setup.x, setup.y, setup.work.criterion, setup.clip

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        fabric.backward(loss)
        if clip:  # by default it raises at the first overflow, which fp16 training is expected to have
            fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
        optimizer.step()
        return loss

    return Contender(FABRIC, step, model, optimizer.optimizer)


def make_deepspeed(setup: Setup) -> Contender:
    """Stage 0, with autocast by `torch_autocast` (`fp16` rejects a CPU)."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed = imported("deepspeed")
    if not dist.is_initialized():  # it works in a process group only
        folder = tempfile.mkdtemp(prefix="deepspeed_")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(setup.x),
        "zero_optimization": {"stage": 0},
        "gradient_clipping": setup.clip,
    }
    if setup.dtype is not None:
        config["torch_autocast"] = {"enabled": True, "dtype": str(setup.dtype).removeprefix("torch.")}
    plain = setup.model()
    os.environ["LOCAL_RANK"] = "0"  # it refuses to start without; with it accelerate would take this for a DDP run
    try:
        engine, optimizer, _, _ = deepspeed.initialize(
            model=plain, optimizer=adamw(plain), config=config, dist_init_required=False
        )
    finally:
        del os.environ["LOCAL_RANK"]
    x, y, criterion = setup.x, setup.y, setup.work.criterion

    def step() -> torch.Tensor:
        loss = criterion(engine(x).float(), y)  # its autocast ends with forward
        engine.backward(loss)
        engine.step()
        return loss

    return Contender(DEEPSPEED, step, engine, getattr(optimizer, "optimizer", optimizer))
