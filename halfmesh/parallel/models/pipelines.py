"""The partitions that come with halfmesh for nn.Sequential and timm's Vision Transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..._torch import call_hooks
from ...errors import InputError
from ..modules import comes_from
from ..pipeline.block_partition import BlockPartition, children_of
from ..pipeline.pieces import Call, Piece


class SequentialPartition:
    """Any nn.Sequential, before each of its modules, and before those of the nn.Sequentials that it is made of."""

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        if not comes_from(model, (nn.Sequential,)):
            return None
        return [self._piece(name, first=index == 0) for index, name in enumerate(self._rows(model, ""))]

    def _rows(self, row: nn.Module, prefix: str) -> Iterator[str]:
        for name in children_of(row):
            child = row.get_submodule(name)
            opens = comes_from(child, (nn.Sequential,)) and len(list(child.children())) > 0
            if opens and not call_hooks(child):  # which run when it is called as a whole
                yield from self._rows(child, f"{prefix}{name}.")
            else:
                yield prefix + name

    def _piece(self, name: str, first: bool) -> Piece:
        def run(model: nn.Module, call: Call, carry: Any) -> Any:
            module = model.get_submodule(name)
            return module(*call.args, **call.kwargs) if first else module(carry)

        return Piece(name, (name,), run)


SEQUENTIAL = SequentialPartition()


# -- timm ------------------------------------------------------------------------------------------------------------


def _vit_begin(model: Any, x: torch.Tensor, attn_mask: Any = None, is_causal: bool = False) -> Any:
    if attn_mask is not None or is_causal:
        raise InputError("a Vision Transformer under a pipeline takes images only; leave attn_mask and is_causal out")
    return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))


def _vit_end(model: Any, x: torch.Tensor) -> Any:
    return model.forward_head(model.norm(x))


def _find_vit_problem(model: Any) -> str | None:
    if getattr(model, "grad_checkpointing", False):
        return "its grad_checkpointing is not known under a pipeline; call model.set_grad_checkpointing(False)"
    return None


TIMM_VIT = BlockPartition(
    layers=("timm.models.vision_transformer.VisionTransformer", "timm.models.deit.VisionTransformerDistilled"),
    methods=("forward_features", "forward_head", "pool"),
    blocks="blocks",
    begin=_vit_begin,
    end=_vit_end,
    end_uses=("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist"),
    find_problem=_find_vit_problem,
)
