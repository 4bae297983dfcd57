"""The partitions for Hugging Face's Llama, GPT-2 and BERT."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...shard import compute_dtype
from ..pipeline.block_partition import BlockPartition

_KNOWN = ("input_ids", "attention_mask", "position_ids")


def _arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[str] = _KNOWN) -> list[Any]:
    """The `known` arguments of a call of the model, in this order, wherever its forward has them.

    Raises:
        InputError: there are others, that change what it computes.
    """
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{type(model).__name__}.forward: {error}") from error
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    given.pop("kwargs", None)
    values = [given.pop(name, None) for name in known]
    if given.get("labels") is not None:
        raise InputError(
            "labels would make the model return its own loss, which is on the last stage only; leave them out, give "
            "a criterion to initialize and write loss = engine.criterion(output, labels)"
        )
    if odd := [name for name, value in given.items() if _matters(name, value)]:
        raise InputError(
            f"{', '.join(odd)}: under a pipeline a Hugging Face model takes {', '.join(known)} only; leave it out"
        )
    if values[0] is None:
        raise InputError(f"under a pipeline a Hugging Face model needs {known[0]}")
    return values


def _matters(name: str, value: Any) -> bool:
    if name == "return_dict":  # the only one that is on by itself
        return value is False
    return value is not None and not (isinstance(value, int) and value == 0)


def _decoder_inputs(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
    """Positions and causal mask, from what the model is called with alone: every stage makes its own."""
    input_ids, attention_mask, position_ids = _arguments(model, args, kwargs)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return position_ids, _make_mask("create_causal_mask", model, input_ids, attention_mask, position_ids)


def _make_mask(maker: str, model: Any, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any = None) -> Any:
    """What transformers' function `maker` makes of an attention mask, for this model."""
    from transformers import masking_utils

    param = next(p for p in model.parameters() if p.is_floating_point())
    # The mask is made for these: their shape, dtype and device count.
    features = torch.empty((*input_ids.shape, 1), dtype=compute_dtype(param), device=input_ids.device)
    given = {
        "config": model.config,
        "inputs_embeds": features,
        "input_embeds": features,  # the name before transformers 5
        "attention_mask": attention_mask,
        "cache_position": torch.arange(input_ids.shape[1], device=input_ids.device),
        "cache": None,
        "past_key_values": None,  # the name before transformers 5.24
        "position_ids": position_ids,
    }
    make = getattr(masking_utils, maker)
    names = inspect.signature(make).parameters
    return make(**{name: value for name, value in given.items() if name in names})


def _find_decoder_problem(model: Any) -> str | None:
    if not getattr(model.config, "return_dict", True):
        return "its config has return_dict=False, but under a pipeline it returns no tuples; set return_dict=True"
    if getattr(model.config, "output_hidden_states", False) or getattr(model.config, "output_attentions", False):
        return "its config asks for hidden states or attentions, which stay on their stages; turn that off"
    return None


def _llama_begin(model: Any, *args: Any, **kwargs: Any) -> Any:
    input_ids, *_ = _arguments(model, args, kwargs)
    return model.model.embed_tokens(input_ids)


def _llama_share(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    position_ids, mask = _decoder_inputs(model, args, kwargs)
    # Of the first argument it takes dtype and device.
    like = next(p for p in model.model.layers.parameters() if p.is_floating_point())
    like = like.new_empty(0, dtype=compute_dtype(like))
    angles = model.model.rotary_emb(like, position_ids=position_ids)
    return {"attention_mask": mask, "position_ids": position_ids, "position_embeddings": angles}


def _call_llama_layer(layer: nn.Module, x: torch.Tensor, shared: dict[str, Any]) -> Any:
    return layer(x, **shared)


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


def _gpt2_begin(model: Any, *args: Any, **kwargs: Any) -> Any:
    input_ids, _, position_ids = _arguments(model, args, kwargs)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    decoder = model.transformer
    return decoder.drop(decoder.wte(input_ids) + decoder.wpe(position_ids))


def _gpt2_share(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    position_ids, mask = _decoder_inputs(model, args, kwargs)
    return {"attention_mask": mask, "position_ids": position_ids}


def _call_gpt2_block(block: nn.Module, x: torch.Tensor, shared: dict[str, Any]) -> Any:
    output = block(x, **shared)
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


_BERT_KNOWN = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def _find_bert_problem(model: Any) -> str | None:
    from transformers import masking_utils

    if getattr(model.config, "is_decoder", False):
        return "its config has is_decoder=True, which is not known under a pipeline; build it as an encoder"
    if not hasattr(masking_utils, "create_bidirectional_mask"):
        return "a pipeline takes BERT from transformers 5 or later; upgrade it, or leave parallel.pipeline out"
    return _find_decoder_problem(model)


def _bert_begin(model: Any, *args: Any, **kwargs: Any) -> Any:
    input_ids, _, token_type_ids, position_ids = _arguments(model, args, kwargs, _BERT_KNOWN)
    return model.bert.embeddings(input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids)


def _bert_share(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    input_ids, attention_mask, *_ = _arguments(model, args, kwargs, _BERT_KNOWN)
    return {"attention_mask": _make_mask("create_bidirectional_mask", model, input_ids, attention_mask)}


def _call_bert_layer(layer: nn.Module, x: torch.Tensor, shared: dict[str, Any]) -> Any:
    output = layer(x, **shared)
    return output[0] if isinstance(output, tuple) else output  # a tuple before transformers 5


def _classify(model: Any, hidden: torch.Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=model.classifier(model.dropout(model.bert.pooler(hidden))))


def _fill_in(model: Any, hidden: torch.Tensor) -> Any:
    from transformers.modeling_outputs import MaskedLMOutput

    return MaskedLMOutput(logits=model.cls(hidden))


def _bert(name: str, end: Callable[[Any, torch.Tensor], Any], end_uses: tuple[str, ...]) -> BlockPartition:
    return BlockPartition(
        layers=(f"transformers.models.bert.modeling_bert.{name}",),
        parts={"bert": "transformers.models.bert.modeling_bert.BertModel"},
        blocks="bert.encoder.layer",
        begin=_bert_begin,
        end=end,
        end_uses=end_uses,
        share=_bert_share,
        block=_call_bert_layer,
        find_problem=_find_bert_problem,
    )


BERT_CLASSIFICATION = _bert("BertForSequenceClassification", _classify, ("bert.pooler", "dropout", "classifier"))
BERT_MASKED = _bert("BertForMaskedLM", _fill_in, ("cls",))
