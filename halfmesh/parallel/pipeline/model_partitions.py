"""The partitions that come with halfmesh: nn.Sequential, timm's Vision Transformer, Hugging Face's Llama and GPT-2."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ... import torch_private
from ...errors import InputError
from ...shard import compute_dtype
from ..kinds import comes_from
from .block_partition import BlockPartition, children_of
from .pieces import Call, Piece


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
            if opens and not torch_private.count_call_hooks(child):  # which run when it is called as a whole
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


# -- Hugging Face ----------------------------------------------------------------------------------------------------

_KNOWN = ("input_ids", "attention_mask", "position_ids")


def _refuse_others(given: dict[str, Any]) -> None:
    """Arguments that change what a causal language model computes."""
    if given.get("labels") is not None:
        raise InputError(
            "labels would make the model return its own loss, which is on the last stage only; leave them out, give "
            "a criterion to initialize and write loss = engine.criterion(output, labels)"
        )
    if odd := [name for name, value in given.items() if _matters(name, value)]:
        raise InputError(
            f"{', '.join(odd)}: under a pipeline a Hugging Face model takes {', '.join(_KNOWN)} only; leave it out"
        )


def _matters(name: str, value: Any) -> bool:
    if name == "return_dict":  # the only one that is on by itself
        return value is False
    return value is not None and not (isinstance(value, int) and value == 0)


def _decoder_inputs(
    model: Any, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None
) -> tuple[torch.Tensor, Any]:
    """Positions and causal mask, from what the model is called with alone: every stage makes its own."""
    from transformers import masking_utils

    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    param = next(p for p in model.parameters() if p.is_floating_point())
    # The mask is made for these: their shape, dtype and device count.
    features = torch.empty((*input_ids.shape, 1), dtype=compute_dtype(param), device=input_ids.device)
    make = masking_utils.create_causal_mask
    given = {
        "config": model.config,
        "inputs_embeds": features,
        "input_embeds": features,  # the name before transformers 5
        "attention_mask": attention_mask,
        "cache_position": torch.arange(input_ids.shape[1], device=input_ids.device),
        "past_key_values": None,
        "position_ids": position_ids,
    }
    names = inspect.signature(make).parameters
    return position_ids, make(**{name: value for name, value in given.items() if name in names})


def _find_decoder_problem(model: Any) -> str | None:
    if not getattr(model.config, "return_dict", True):
        return "its config has return_dict=False, but under a pipeline it returns no tuples; set return_dict=True"
    if getattr(model.config, "output_hidden_states", False) or getattr(model.config, "output_attentions", False):
        return "its config asks for hidden states or attentions, which stay on their stages; turn that off"
    return None


def _llama_begin(
    model: Any, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **others: Any
) -> Any:
    _refuse_others(others)
    return model.model.embed_tokens(input_ids)


def _llama_share(
    model: Any, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **others: Any
) -> dict[str, Any]:
    position_ids, mask = _decoder_inputs(model, input_ids, attention_mask, position_ids)
    # Of the first argument it takes dtype and device.
    like = next(p for p in model.model.layers.parameters() if p.is_floating_point())
    like = like.new_empty(0, dtype=compute_dtype(like))
    angles = model.model.rotary_emb(like, position_ids=position_ids)
    return {"attention_mask": mask, "position_ids": position_ids, "position_embeddings": angles}


def _call_llama_layer(layer: nn.Module, x: torch.Tensor, shared: dict[str, Any]) -> Any:
    return layer(x, past_key_values=None, use_cache=False, **shared)


def _llama_end(model: Any, hidden: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=model.lm_head(model.model.norm(hidden)))


LLAMA = BlockPartition(
    layers=("transformers.models.llama.modeling_llama.LlamaForCausalLM",),
    parts={"model": "transformers.models.llama.modeling_llama.LlamaModel"},
    blocks="model.layers",
    begin=_llama_begin,
    end=_llama_end,
    end_uses=("model.norm", "lm_head"),
    share=_llama_share,
    shared_uses=("model.rotary_emb",),
    block=_call_llama_layer,
    find_problem=_find_decoder_problem,
)


def _gpt2_begin(
    model: Any, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **others: Any
) -> Any:
    _refuse_others(others)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    decoder = model.transformer
    return decoder.drop(decoder.wte(input_ids) + decoder.wpe(position_ids))


def _gpt2_share(
    model: Any, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None, **others: Any
) -> dict[str, Any]:
    position_ids, mask = _decoder_inputs(model, input_ids, attention_mask, position_ids)
    return {"attention_mask": mask, "position_ids": position_ids}


def _call_gpt2_block(block: nn.Module, x: torch.Tensor, shared: dict[str, Any]) -> Any:
    output = block(x, past_key_values=None, use_cache=False, **shared)
    return output[0] if isinstance(output, tuple) else output  # a tuple before transformers 5


def _gpt2_end(model: Any, hidden: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    return CausalLMOutputWithCrossAttentions(logits=model.lm_head(model.transformer.ln_f(hidden)))


GPT2 = BlockPartition(
    layers=("transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel",),
    parts={"transformer": "transformers.models.gpt2.modeling_gpt2.GPT2Model"},
    blocks="transformer.h",
    begin=_gpt2_begin,
    end=_gpt2_end,
    end_uses=("transformer.ln_f", "lm_head"),
    share=_gpt2_share,
    block=_call_gpt2_block,
    find_problem=_find_decoder_problem,
)
