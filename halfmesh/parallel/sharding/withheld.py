"""Placeholders in `param.grad` where the gradient must not be used."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ...errors import InputError

SCATTERED = "where under data='zero1' each rank has the sums of its own shard only"
UNFINISHED = (
    "where under data='fsdp' it is still multiplied by the loss scale, not yet divided by the losses' weights, or of "
    "this rank's part of the model only"
)


class WithheldGradient(torch.Tensor):
    """A placeholder with the shape and dtype of a gradient and no values. Computing with it raises InputError.

    With None instead, `torch.nn.utils.clip_grad_norm_` would silently skip the parameter.
    """

    param_name: str
    why: str

    @staticmethod
    def of(param: torch.Tensor, name: str, why: str) -> WithheldGradient:
        """The placeholder for `param`, which has this `name` in the model; `why` ends the message."""
        grad: WithheldGradient = torch.Tensor._make_wrapper_subclass(
            WithheldGradient, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        grad.param_name, grad.why = name, why
        return grad

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        grad = next(tensor for tensor in given if isinstance(tensor, cls))
        raise InputError(
            f"the gradient of {grad.param_name!r} was used between engine.backward and engine.step ({function}), "
            f"{grad.why}. To clip, set clip_grad_norm in the config or call engine.clip_grad_norm_(max_norm), which "
            "returns the norm; to add another loss, call engine.backward(loss)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the gradient of {self.param_name!r}, {self.why}>"
