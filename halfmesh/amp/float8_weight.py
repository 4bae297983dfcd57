"""A linear layer's weight that was gathered in float8, with which the layer multiplies without a cast.

Imports torchao, so it is imported where float8 is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig

from ..errors import InputError

aten = torch.ops.aten


class Float8Weight(Float8TrainingTensor):
    """torchao's tensor of float8 numbers and a scale, which may be used in products only. (torchao's own, used
    otherwise, fails in torchao's words, or gives the model rounded weights.)

    Args:
        data: the float8 numbers.
        scale: 0-dim fp32; the weight is `data / scale`.
        dtype: the dtype that it shows, and that of its gradient.
        products: how torchao multiplies.
    """

    @staticmethod
    def of(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, products: LinearMMConfig) -> Float8Weight:
        return Float8Weight(data, scale, dtype, products, GemmInputRole.WEIGHT)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: dict[str, Any], *_: Any) -> Float8Weight:
        return Float8Weight.of(inner["_data"], inner["_scale"], context["_orig_dtype"], context["_linear_mm_config"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight, keys = args[0], kwargs or {}
        if func in _VIEWS:
            data = func(weight._data, *args[1:], **keys)
            return cls.of(data, weight._scale, weight._orig_dtype, weight._linear_mm_config)
        if func is aten._to_copy.default and keys.keys() == {"dtype"}:  # autocast, before each product
            return cls.of(weight._data, weight._scale, keys["dtype"], weight._linear_mm_config)
        if func is aten.zeros_like.default:  # FSDP2's gradient of a weight that had none
            return func(weight._data, **{"dtype": weight._orig_dtype, **keys})
        if func is aten.mm.default and all(isinstance(factor, Float8TrainingTensor) for factor in args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        raise InputError(
            f"the model computes {func} with the weight of a linear layer, but data='fsdp' gathers it in float8, for "
            "the layer's own product only; add the layer's name to fp8.filter, or use recipe='rowwise'"
        )


_VIEWS = frozenset({aten.t.default, aten.detach.default, aten.as_strided.default, aten.alias.default})
