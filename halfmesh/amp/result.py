"""What one update did, read only when somebody asks."""

from __future__ import annotations

import torch

from .host_copy import HostCopy


class StepResult:
    """What one update did. Attributes are read from the device when first asked for, locally: no communication.

    On a GPU the numbers are already on their way: a copy to host memory is started with the update and does not
    hold it up.
    """

    def __init__(
        self,
        lr: float | torch.Tensor,
        skipped: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        num_zeros: torch.Tensor | None = None,
    ) -> None:
        self._lr = lr
        named = {"skipped": skipped, "norm": norm, "scale": scale, "num_zeros": num_zeros}
        given = {name: value for name, value in named.items() if value is not None}
        self._names = list(given)
        self._read: dict[str, float] | None = None if given else {}
        if given:
            self._copy = HostCopy(torch.stack([value.double() for value in given.values()]))

    def _get(self, name: str) -> float | None:
        if self._read is None:
            self._read = dict(zip(self._names, self._copy.read(), strict=True))
        return self._read.get(name)

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because a gradient on some rank was inf or nan."""
        return bool(self._get("skipped"))

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients over all ranks, unscaled and before clipping; None if nothing asked for it."""
        return self._get("norm")

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
