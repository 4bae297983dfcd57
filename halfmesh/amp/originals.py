"""Full-precision originals of tensors that are cast but not trained: frozen parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..utils.torch_private import has_no_memory


class Originals:
    """The full-precision values of tensors that have no master, so that `close` restores them exactly.

    A value is kept on the host, and only where rounding changes it: nothing for weights published in bf16, nor for
    most buffers.
    """

    def __init__(self) -> None:
        self._dtypes: dict[torch.Tensor, torch.dtype] = {}
        self._values: dict[torch.Tensor, torch.Tensor] = {}
        self._targets: dict[torch.Tensor, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Register that `tensor` was cast from `value`."""
        self._dtypes[tensor] = value.dtype
        self.keep(tensor, value)

    @torch.no_grad()
    def keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Replace the original of `tensor` by `value`, if there is one."""
        if tensor not in self._dtypes or has_no_memory(tensor):
            return
        value = value.detach().to(self._dtypes[tensor])
        self._values.pop(tensor, None)
        if not torch.equal(value.to(tensor.dtype).to(value.dtype), value):
            self._values[tensor] = value.to("cpu", copy=True)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The original, with what user code wrote into `tensor` since; None: `tensor` itself is exact."""
        kept = self._values.get(tensor)
        return None if kept is None else current_value(tensor, kept.to(tensor.device))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remove and return the full value of `tensor`, which now gets a master."""
        value = self.value(tensor)
        self._dtypes.pop(tensor, None)
        self._values.pop(tensor, None)
        return tensor if value is None else value

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor into which a new value of all of `tensor` has to be written; `publish` follows."""
        if tensor not in self._dtypes:
            return tensor.detach()
        self._targets[tensor] = torch.empty_like(tensor, dtype=self._dtypes[tensor], device="cpu")
        return self._targets[tensor].detach()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the values written into the targets into the model."""
        while self._targets:
            tensor, value = self._targets.popitem()
            tensor.copy_(value)
            self.keep(tensor, value)


def current_value(tensor: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """`full`, or a copy with those elements of `tensor` that differ from its rounded ones: user code wrote them."""
    return current_values([(tensor, full)])[0]


@torch.no_grad()
def current_values(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """`current_value` of each pair. The host reads once for all of them."""
    if not pairs:
        return []
    place = pairs[0][0].device
    changed = torch.stack([(tensor != full.to(tensor.dtype)).any().to(place) for tensor, full in pairs]).cpu().tolist()
    return [
        torch.where(tensor != full.to(tensor.dtype), tensor.float(), full) if is_changed else full.detach()
        for (tensor, full), is_changed in zip(pairs, changed, strict=True)
    ]
