"""What one update did, read only when somebody asks."""

from __future__ import annotations

import torch

from .host_copy import HostCopy


class StepResult:
    """What one update did. Attributes are read from the device when first asked for, locally: no communication.

    On a GPU the numbers are already on their way: a copy to host memory is started with the update and does not
    hold it up.
    """

    def __init__(self, lr: float | torch.Tensor, device: torch.device, **numbers: torch.Tensor | None) -> None:
        """Of `numbers`, 0-dim tensors on `device` that nobody writes any more, those that are known: `skipped`, `norm`
        (of the gradients as they were), `total` (what these were too large by), `scale`, `num_zeros`."""
        self._lr = lr
        self._numbers = numbers
        self._copy = None if device.type == "cpu" else HostCopy(list(self._known().values()))
        self._read: dict[str, float] | None = None

    def _known(self) -> dict[str, torch.Tensor]:
        return {name: number for name, number in self._numbers.items() if number is not None}

    def _get(self, name: str) -> float | None:
        if self._numbers[name] is None:
            return None
        if self._read is None:
            known = self._known()
            copy = self._copy or HostCopy(list(known.values()))
            self._read = dict(zip(known, copy.read(), strict=True))
        return self._read[name]

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because a gradient on some rank was inf or nan."""
        return bool(self._get("skipped"))

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients over all ranks, unscaled and before clipping; None if nothing asked for it."""
        norm = self._get("norm")
        total = None if norm is None else self._get("total")
        return norm if norm is None or total is None else norm / total

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step's backward (of loss_id 0); 1.0 without loss scaling."""
        scale = self._get("scale")
        return 1.0 if scale is None else scale

    @property
    def num_zeros(self) -> int | None:
        """Number of gradient elements that are exactly zero, over all ranks; None unless asked for."""
        zeros = self._get("num_zeros")
        return None if zeros is None else round(zeros)

    @property
    def lr(self) -> float:
        """The learning rate used, of the first parameter group."""
        return float(self._lr)

    def __repr__(self) -> str:
        return (
            f"StepResult(skipped={self.skipped}, grad_norm={self.grad_norm}, loss_scale={self.loss_scale:g}, "
            f"lr={self.lr:g}, num_zeros={self.num_zeros})"
        )
