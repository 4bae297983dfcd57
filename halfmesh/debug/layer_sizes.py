"""Sizes of layers that tensor cores do not like."""

from __future__ import annotations

from torch import nn

MULTIPLE = 8
"""Elements of half precision in 16 bytes. Matrix products on tensor cores are most efficient where the sizes are
multiples of that (NVIDIA, "Matrix Multiplication Background User's Guide", section on tensor core requirements)."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_IMAGE = 4
"""Channels that a first layer may have: no other choice, and libraries have kernels of their own for it."""


def odd_sizes(module: nn.Module) -> tuple[str, ...]:
    """The sizes of what this rank has of `module` that are no multiple of `MULTIPLE`, as "out_features=10"."""
    return tuple(f"{name}={size}" for name, size in _sizes(module).items() if size % MULTIPLE)


def _sizes(module: nn.Module) -> dict[str, int]:
    if isinstance(module, nn.Linear):
        rows, columns = _shape(module) or (module.out_features, module.in_features)
        return {"in_features": columns, "out_features": rows}
    if isinstance(module, nn.Embedding):
        return {"embedding_dim": (_shape(module) or (0, module.embedding_dim))[1]}
    if isinstance(module, _CONVOLUTIONS):
        inside = {"in_channels": module.in_channels} if module.in_channels > _IMAGE else {}
        return {**inside, "out_channels": module.out_channels}
    return {}


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """That of the weight, in a tensor group of its own part; None where no matrix is kept. Reading `module.weight`
    would compute a parametrized one, and spectral norm changes its buffers then."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return (weight.shape[0], weight.shape[1]) if weight is not None and weight.dim() == 2 else None
