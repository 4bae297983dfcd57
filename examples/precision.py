"""Precision: the same training in fp32 and in six half precisions, chosen by the config alone.

    python examples/precision.py
    torchrun --standalone --nproc-per-node 2 examples/precision.py

Prints for each the loss over all digits and the accuracy, which agree within half precision's rounding.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "torch fp16": dict(fp16=dict(mode="torch")),  # fp32 weights; torch.autocast decides for each operation
    "torch bf16": dict(bf16=dict(mode="torch")),  # bf16 has the range of fp32: no loss scale
    "naive fp16": dict(fp16=dict(mode="naive")),  # all of the model in fp16; the optimizer has fp32 masters
    "naive bf16": dict(bf16=dict(mode="naive")),
    "apex O1": dict(fp16=dict(mode="apex", opt_level="O1")),  # NVIDIA apex's levels; apex itself is not needed
    "apex O2": dict(fp16=dict(mode="apex", opt_level="O2")),
}

digits = load_digits()  # 1,797 handwritten digits of 8 x 8 pixels, part of scikit-learn
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))


def evaluate(engine: halfmesh.Engine) -> tuple[float, float]:
    """Mean loss and accuracy over all digits, the same on every rank."""
    engine.eval()
    sums = torch.zeros(3, device=engine.context.device)  # losses, right ones, all
    with torch.no_grad():
        for images, labels in engine.eval_dataloader:
            output = engine(images)
            sums[0] += engine.criterion(output, labels) * len(labels)
            sums[1] += (output.argmax(1) == labels).sum()
            sums[2] += len(labels)
    engine.context.all_reduce(sums, "dp")  # each data rank has seen its part
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


for name, config in PRECISIONS.items():
    torch.manual_seed(0)  # each begins with the same weights
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    engine = halfmesh.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        nn.CrossEntropyLoss(),
        DataLoader(data, batch_size=64, shuffle=True),
        config,
        eval_dataloader=DataLoader(data, batch_size=256),
    )
    for _ in range(2):  # epochs
        for images, labels in engine.dataloader:
            engine.zero_grad()
            output = engine(images)
            loss = engine.criterion(output, labels)
            engine.backward(loss)
            engine.step()
    mean_loss, accuracy = evaluate(engine)
    if engine.context.rank == 0:
        weights = next(engine.model.parameters()).dtype
        print(
            f"{name:10}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  weights {weights}, output {output.dtype}, "
            f"loss scale {engine.loss_scale:g}, {engine.skipped_steps} of {engine.global_step} updates skipped",
            flush=True,
        )
    engine.close()
