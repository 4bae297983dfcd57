"""fp8: computes the products of linear layers in float8 with torchao's functions, and everything else in bfloat16.

Both factors of a product are scaled to float8's range and cast when it is computed, in forward and in backward; a
weight that ranks gather is cast before the all-gather. Weights, gradients and activations keep their dtype, so
checkpoints do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from ..errors import did_you_mean, shorten
from ..utils.torch_private import has_no_memory

Scaling = Literal["tensorwise", "rowwise"]
Emulate = Literal["auto", True, False]

# Names of output layers in timm, torchvision, transformers and nanoGPT. Their logits suffer most from float8.
HEADS = ("*head", "*classifier", "*score", "fc", "output", "*.decoder")
# The tensor cores' float8 products need sizes that this divides.
MULTIPLE = 16


@dataclass(frozen=True)
class Float8Product:
    """Computes the product of a linear layer in float8. Called with the arguments of `torch.nn.functional.linear`.

    Attributes:
        scaling: "tensorwise": one scale per tensor. "rowwise": one scale per row.
        emulate: compute the same product in fp32, which is slow. "auto": only on devices without float8.
        filter: patterns of names of layers that stay in bfloat16. None: the patterns of `HEADS`.
    """

    scaling: Scaling = "tensorwise"
    emulate: Emulate = "auto"
    filter: tuple[str, ...] | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # As torch.autocast does for F.linear. The weight is cast from its own dtype.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        multiply, options = _torchao(self.scaling, self._emulates(x.device))
        output: torch.Tensor = multiply(x.contiguous(), weight.t(), *options)  # torchao reshapes it once it is cast
        if bias is None:  # not as a view, which could not be summed in place over a tensor group
            return torch.ops.aten._unsafe_view(output, output.shape)
        return output + bias.to(output.dtype)

    def layers(self, model: nn.Module) -> Iterator[tuple[str, nn.Linear, bool]]:
        """Yield the linear layers of `model`: name, layer, and True if it multiplies in float8 (else in bfloat16).

        A layer that overrides `forward` is left out, and so are the projections of torch.nn.MultiheadAttention, which
        computes with their weights and does not call them.
        """
        patterns = HEADS if self.filter is None else self.filter
        uncalled = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) or id(layer) in uncalled or not _computes_product(layer):
                continue
            if layer.weight is not None:  # else it is on another stage of the pipeline
                is_filtered = any(fnmatchcase(name, pattern) for pattern in patterns)
                yield name, layer, not is_filtered and all(size % MULTIPLE == 0 for size in layer.weight.shape)

    def cast_before_gather(self, model: nn.Module) -> dict[nn.Parameter, Float8Product]:
        """Return the weights that may be cast before ranks gather them, with their casts: those that are used in float8
        products only. Empty with rowwise scales, because forward needs one per row of a weight and backward one per
        column."""
        if self.scaling != "tensorwise":
            return {}
        layers = dict.fromkeys(layer for _, layer, in_float8 in self.layers(model) if in_float8)
        others = {
            param
            for module in model.modules()
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
            if module not in layers or name != "weight"
        }
        weights: list[Any] = [layer.weight for layer in layers]
        return {weight: self for weight in weights if weight not in others}

    def pack(self, part: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast a weight before ranks gather it: the numbers of `part`, a rank's shard of it, as uint8, and the scale.
        They are those of the product's own cast of the full weight.

        Args:
            largest: absolute value in the full weight, 0-dim.
        """
        from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

        dtype = _torchao(self.scaling, True)[1][1].cast_config_weight.target_dtype
        scale = amax_to_scale(largest, dtype)
        return to_fp8_saturated(part.float() * scale, dtype).view(torch.uint8), scale

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the layer computes with, of `dtype`: a view of all ranks' numbers and of the scale, both of
        which are written again for each gather."""
        from .float8_weight import Float8Weight

        options, config = _torchao(self.scaling, self._emulates(data.device))[1]
        return Float8Weight.of(data.view(config.cast_config_weight.target_dtype), scale, dtype, options)

    def install(self, model: nn.Module) -> None:
        """Make the layers of `model`, or of this rank's shard or stage of it, multiply in float8."""
        for _, layer, in_float8 in self.layers(model):
            if in_float8 and hasattr(layer, "product"):  # a sharded layer, which computes more than the product
                setattr(layer, "product", self)  # noqa: B010 (an attribute that nn.Linear lacks)
            elif in_float8:
                layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def remove(self, model: nn.Module) -> None:
        """Undo `install`."""
        for module in model.modules():
            if isinstance(vars(module).get("product"), Float8Product):  # else it is the user's
                del module.product
            if _is_installed(module):
                del module.forward

    def find_problems(self, model: nn.Module, device: torch.device) -> Iterator[str]:
        """Yield the reasons why it cannot be used."""
        if find_spec("torchao") is None:
            yield "fp8: it needs the package torchao, which is not installed; pip install 'halfmesh[fp8]'"
        planned = any(map(has_no_memory, model.parameters()))  # a dry run simulates another device
        if self.emulate is False and not planned and not has_float8(device):
            yield f"fp8.emulate: False, but {device.type} has no float8 (CUDA from compute capability 8.9 on); use bf16"
        layers = list(self.layers(model))
        names = [name for name, *_ in layers]
        for pattern in self.filter or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                yield f"fp8.filter: no linear layer is named {pattern!r}{did_you_mean(pattern, names)}"
        if not any(in_float8 for *_, in_float8 in layers):
            yield f"fp8: every linear layer is in fp8.filter, or has a size that {MULTIPLE} does not divide; use bf16"

    def describe(self, model: nn.Module, device: torch.device) -> str:
        """The layers of this rank that multiply in float8, and those that do not, in words."""
        layers = list(self.layers(model))
        stay = [name for name, _, in_float8 in layers if not in_float8]
        how = f"{self.scaling} scales{', emulated' * self._emulates(device)}"
        text = f"{len(layers) - len(stay)} of {len(layers)} linear layers in float8 ({how})"
        return text + (f", {shorten(stay)} in bfloat16" if stay else "")

    def _emulates(self, device: torch.device) -> bool:
        return not has_float8(device) if self.emulate == "auto" else self.emulate


def has_float8(device: torch.device) -> bool:
    """Return True if `device` multiplies float8 numbers itself."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _computes_product(layer: nn.Linear) -> bool:
    if hasattr(layer, "product"):
        return not getattr(layer, "transposed", False)  # transformers' Conv1D, which is not an nn.Linear elsewhere
    return type(layer).forward is nn.Linear.forward and ("forward" not in vars(layer) or _is_installed(layer))


def _is_installed(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _forward


def _forward(layer: nn.Linear, product: Float8Product, x: torch.Tensor) -> torch.Tensor:
    return product(x, layer.weight, layer.bias)


@cache
def _torchao(scaling: Scaling, emulate: bool) -> tuple[Any, tuple[Any, Any]]:
    """torchao's product of two matrices, and its further arguments. torchao's Float8Linear is not used: it casts its
    input only under CUDA's autocast, and it would replace sharded layers."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    # The kernels take multiples of 16 only: rows of a batch, over which the weight's gradient sums, are filled up.
    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate, pad_inner_dim=not emulate)
    with torch.device("meta"):
        options = Float8Linear(MULTIPLE, MULTIPLE, config=config).linear_mm_config
    return matmul_with_hp_or_float8_args.apply, (options, config)
