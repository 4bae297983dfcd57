"""Other engines, where they are installed. Each is made to compute in the precision that it is asked for.

Two of them change fp16 on a CPU without an error, so the measurement would be of something else: accelerate computes
in fp32, Fabric in bf16. What is done about it is said in the rows' notes, and `harness.complaint` looks at the dtype.
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
from .harness import Contender, Unavailable

ACCELERATE = "accelerate"
FABRIC = "Lightning Fabric"
DEEPSPEED = "DeepSpeed"


def imported(name: str) -> Any:
    """The module. Environment variables that its import sets are taken back.

    PYTORCH_NVML_BASED_CUDA_CHECK=1, which two of the peers leave behind, makes torch open a library in every step of
    everybody's optimizer where torch is built for CUDA and there is no GPU.

    Raises:
        Unavailable: it cannot be imported, for whatever reason it gives.
    """
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # a peer's import may fail in any way
        raise Unavailable(f"not importable: {type(error).__name__}: {error}") from error
    finally:
        for variable in os.environ.keys() - before.keys():
            del os.environ[variable]


def make_accelerate(setup: Setup) -> Contender:
    accelerate = imported("accelerate")
    mixed = setup.precision if setup.dtype is not None else "no"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    note = ""
    if setup.precision == "fp16":
        # Before prepare(), which would leave out autocast and scaler on a CPU.
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
        note = "fp16 forced: by itself it computes in fp32 on a CPU"
    plain = setup.model()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    x, y, criterion, clip = setup.x, setup.y, setup.work.criterion, setup.clip

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        accelerator.backward(loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    def close() -> None:
        # Its settings belong to the process, and would change the next Accelerator.
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()

    return Contender(ACCELERATE, step, model, optimizer.optimizer, close=close, note=note)


def make_fabric(setup: Setup) -> Contender:
    fabric_module = imported("lightning_fabric")
    options: dict[str, Any] = {"precision": {"fp32": "32-true", "bf16": "bf16-mixed"}.get(setup.precision)}
    note = ""
    if setup.precision == "fp16":
        precision = imported("lightning_fabric.plugins").MixedPrecision
        options = {"plugins": [precision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}
        note = "fp16 forced: by itself it computes in bf16 on a CPU"
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, **options)
    plain = setup.model()
    model, optimizer = fabric.setup(plain, adamw(plain))
    x, y, criterion, clip = setup.x, setup.y, setup.work.criterion, setup.clip

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        fabric.backward(loss)
        if clip:  # its own default raises at the first overflow, which fp16 training is expected to have
            fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
        optimizer.step()
        return loss

    return Contender(FABRIC, step, model, optimizer.optimizer, note=note)


def make_deepspeed(setup: Setup) -> Contender:
    """Its own initialize(), stage 0, autocast by `torch_autocast` (`fp16` refuses a CPU)."""
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
    os.environ["LOCAL_RANK"] = "0"  # it refuses to start without; and with it accelerate would take this for a DDP run
    try:
        engine, optimizer, _, _ = deepspeed.initialize(
            model=plain, optimizer=adamw(plain), config=config, dist_init_required=False
        )
    finally:
        del os.environ["LOCAL_RANK"]
    x, y, criterion = setup.x, setup.y, setup.work.criterion

    def step() -> torch.Tensor:
        loss = criterion(engine(x).float(), y)  # its autocast ends with forward, and a loss in fp16 is another one
        engine.backward(loss)
        engine.step()
        return loss

    return Contender(DEEPSPEED, step, engine, getattr(optimizer, "optimizer", optimizer))
