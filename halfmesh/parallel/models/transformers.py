"""Plans for transformers: tensor plans (the models' own; for GPT-2, BERT and T5, which have none, from here), and the
stages of Llama, GPT-2 and BERT."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from ...utils.param_shard import compute_dtype
from ..pipeline.partition import BlockPartition
from ..tensor.plans import LayerPlan, elementwise
from .peft import base_model

# -- a model's own tensor plan ---------------------------------------------------------------------------------------


class HuggingFacePlan:
    """A Hugging Face model's own `tp_plan`, in halfmesh's styles."""

    STYLES: Mapping[str, str] = {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "colwise_rep": "colwise_gather",
        "colwise_gather_output": "colwise_gather",
        "rowwise_rep": "rowwise_split",
        "rowwise_split_input": "rowwise_split",
        "embedding_rowwise": "vocab",
        "embedding_colwise": "embedding_gather",
        "replicated_with_grad_allreduce": "partial",
        "mla_kv_a_proj": "latent_keys({config.qk_rope_head_dim})",
        "replicate": "",
        "all_reduce": "",
        "local_params": "",  # its parameters have entries in the plan themselves
    }
    SEQUENCE: Mapping[str, str] = {
        "layers.0": "sequence_begin",
        "layers.*.input_layernorm": "sequence",
        "layers.*.post_attention_layernorm": "sequence",
        "layers.*.self_attn": "region(hidden_states)",
        "layers.*.mlp": "region(x)",
        "norm": "sequence_end",
    }
    """For decoders with Llama's modules; the checks of the plan report models that differ."""

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        inner = base_model(model)
        plan, config = getattr(inner, "tp_plan", None), getattr(inner, "config", None)
        if not isinstance(plan, Mapping) or not plan or config is None:
            return
        names = [name for name, _ in model.named_modules()]
        top = next(name for name, module in model.named_modules() if module is inner)  # in a model of PEFT
        prefix = f"{top}." if top else ""
        for pattern, theirs in plan.items():
            if "experts" in pattern.split("."):
                continue  # the parameters of all experts, which stay unsharded
            if theirs not in self.STYLES:
                raise InputError(f"tp_plan's style {theirs!r} of {pattern!r} is unknown; write parallel.tensor.plan")
            if style := self.STYLES[theirs]:
                style = style.format(config=config.get_text_config()) if "{" in style else style
                yield from ((name, style) for name in names if fnmatchcase(name, prefix + pattern))
                for name, param in model.named_parameters() if style == "colwise" else ():
                    if fnmatchcase(name, prefix + pattern) and param.dim() == 1:  # an attention's: one number per head
                        owner, _, own = name.rpartition(".")
                        yield owner, f"rows({own})"
        for name in ("num_attention_heads", "num_key_value_heads"):  # attention takes their number from the shape
            if isinstance(getattr(config, name, None), int):
                yield top, f"config_heads({name})"
        if sequence_parallel:
            base = prefix + getattr(inner, "base_model_prefix", "")
            prefix = f"{base}." if base in names else prefix
            for pattern, style in self.SEQUENCE.items():
                yield from ((name, style) for name in names if fnmatchcase(name, prefix + pattern))


HUGGING_FACE = HuggingFacePlan()

# -- tensor plans for models that have none ---------------------------------------------------------------------------


def _find_cross_attention(attention: Any) -> str | None:
    return "this plan has no cross-attention" if getattr(attention, "is_cross_attention", False) else None


_GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2"
GPT2_ATTENTION = LayerPlan(
    (f"{_GPT2}Attention",),
    {"": "heads(num_heads, split_size)", "c_attn": "fused_colwise(3)", "c_proj": "rowwise"},
    find_problem=_find_cross_attention,
)
GPT2_MLP = LayerPlan((f"{_GPT2}MLP",), {"c_fc": "colwise", "c_proj": "rowwise"}, find_problem=elementwise("act"))


def _bert_kinds(name: str) -> tuple[str, ...]:
    """BERT's class of this name, and those of models with the same modules."""
    models = {"bert": "Bert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "electra": "Electra"}
    return tuple(f"transformers.models.{m}.modeling_{m}.{prefix}{name}" for m, prefix in models.items())


BERT_ATTENTION = LayerPlan(
    _bert_kinds("Attention"),
    {"self": "heads(num_attention_heads, all_head_size)", "self.[qkv]*": "colwise", "output.dense": "rowwise"},
    find_problem=_find_cross_attention,
)
BERT_LAYER = LayerPlan(
    _bert_kinds("Layer"),
    {"intermediate.dense": "colwise", "output.dense": "rowwise"},
    find_problem=elementwise("intermediate.intermediate_act_fn"),
)

_T5 = "transformers.models.t5.modeling_t5.T5"
T5_ATTENTION = LayerPlan(
    (f"{_T5}Attention",),
    {"": "heads(n_heads, inner_dim)", "[qkv]": "colwise", "o": "rowwise"}
    | {"relative_attention_bias": "embedding_features"},
)
T5_MLP = LayerPlan(
    (f"{_T5}DenseActDense", f"{_T5}DenseGatedActDense"),
    {"wi*": "colwise", "wo": "rowwise"},
    find_problem=elementwise("act"),
)

# -- sharded sequences -------------------------------------------------------------------------------------------------


def _is_transformers(model: Any) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


_MASKS = {
    "full_attention": ("create_bidirectional_mask", "create_causal_mask"),
    "sliding_attention": ("create_bidirectional_sliding_window_mask", "create_sliding_window_causal_mask"),
}
"""transformers' functions for each kind of layer: of encoders and of decoders."""


def _layer_kinds(config: Any) -> set[str]:
    every = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [every])


def _is_causal(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", False) for module in model.modules())


def find_context_problem(model: nn.Module) -> str | None:
    """The reason why sequences of a Hugging Face model, `model` or one within it, cannot be sharded."""
    model = base_model(model)
    for name, module in model.named_modules():
        if not _is_transformers(module):
            continue
        config: Any = module.config
        config, inside = config.get_text_config(), f"{name}: " if name else ""
        kind = getattr(config, "_attn_implementation", None)
        if kind != "sdpa":
            return f"{inside}its attention {kind!r} cannot be sharded; load it with attn_implementation='sdpa'"
        if other := _layer_kinds(config) - set(_MASKS):
            return f"{inside}its layers have {', '.join(sorted(other))}, and only attention can be sharded"
        maker = _MASKS["sliding_attention"][_is_causal(module)]
        is_known = any(hasattr(sys.modules[kind.__module__], maker) for kind in type(module).__mro__)
        if "sliding_attention" in _layer_kinds(config) and not is_known:
            return f"{inside}its windows are not those of transformers' {maker}; let it attend to all tokens"
        if rope := {"dynamic", "longrope"} & set(re.findall(r"\w+", str(getattr(config, "rope_parameters", "")))):
            return f"{inside}its rotations are {rope.pop()!r}, which depend on the length, of which a rank has a part"
    return None


def without_cache(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, such that a model which keeps keys and values by default does not.

    Raises:
        InputError: they were asked for.
    """
    if asked := [name for name in ("past_key_values", "use_cache") if given.get(name)]:
        raise InputError(f"{asked[0]}: with parallel.context a rank has keys of its tokens only; decode without it")
    model = base_model(model)
    keeps = _is_transformers(model) and getattr(model.config.get_text_config(), "use_cache", False)
    return given | {"use_cache": False} if keeps else given


def whole_sequence_arguments(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, prepared as a Hugging Face model would do itself: labels are shifted, masks of
    padding, joined sequences or windows become those of all pairs of tokens, and positions are counted without padding.
    """
    model = base_model(model)
    if not _is_transformers(model):
        return given
    labels, mask, positions = given.get("labels"), given.get("attention_mask"), given.get("position_ids")
    if labels is not None and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss":
        given.setdefault("shift_labels", F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous())
    ids = given.get("input_ids")
    kinds = _layer_kinds(model.config.get_text_config())
    is_made_before = mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2)
    # Positions separate joined sequences. Without any mask attention is causal by itself.
    if not is_made_before and (mask is not None or positions is not None or "sliding_attention" in kinds):
        like = mask if mask is not None else ids if ids is not None else given["inputs_embeds"][..., 0]
        masks = {kind: _make_mask(_MASKS[kind][_is_causal(model)], model, like, mask, positions) for kind in kinds}
        given["attention_mask"] = masks if len(masks) > 1 else masks.popitem()[1]
    count = "create_position_ids_from_input_ids"  # RoBERTa and others, past the padding's
    counter: Any = next((module for module in model.modules() if hasattr(module, count)), None)
    if positions is None and ids is not None and counter is not None and hasattr(counter, "padding_idx"):
        given["position_ids"] = getattr(counter, count)(ids, counter.padding_idx)
    return given


# -- stages -----------------------------------------------------------------------------------------------------------

_DECODER = ("input_ids", "attention_mask", "position_ids")
_ENCODER = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def _arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], known: Sequence[str]) -> list[Any]:
    """The values of the `known` arguments in a call of the model, in this order.

    Raises:
        InputError: there are other arguments that change the result.
    """
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    given = {**bound, **bound.get("kwargs", {}), "kwargs": None}
    values = [given.pop(name, None) for name in known]
    given["return_dict"] = given.get("return_dict") is False  # the only one that is on by default
    if odd := [n for n, value in given.items() if value is not None and not (isinstance(value, int) and value == 0)]:
        raise InputError(f"{', '.join(odd)}: a Hugging Face model in a pipeline takes only {', '.join(known)}")
    return values


def _positions(input_ids: torch.Tensor, position_ids: Any) -> torch.Tensor:
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None] if position_ids is None else position_ids


def _make_mask(maker: str, model: Any, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any = None) -> Any:
    """The mask that transformers' function `maker` makes for this model."""
    from transformers import masking_utils

    param = next(p for p in model.parameters() if p.is_floating_point())
    given = {
        "config": model.config,
        # Only its shape, dtype and device are used.
        "inputs_embeds": torch.empty((*input_ids.shape, 1), dtype=compute_dtype(param), device=input_ids.device),
        "attention_mask": attention_mask,
        "cache_position": torch.arange(input_ids.shape[1], device=input_ids.device),
        "cache": None,
        "past_key_values": None,  # the name before transformers 5.24
        "position_ids": position_ids,
    }
    make = getattr(masking_utils, maker)
    names = inspect.signature(make).parameters
    return make(**{name: value for name, value in given.items() if name in names})


def _stages(
    model: str, base: tuple[str, str], output: str, logits: Callable[[Any, Any], torch.Tensor], **options: Any
) -> BlockPartition:
    """The partition of the class `model` ("gpt2.GPT2LMHeadModel"), whose module `base[0]` is of the class `base[1]`. It
    returns an `output` with the logits that the end computes."""
    module, _, name = model.partition(".")
    home = f"transformers.models.{module}.modeling_{module}"
    return BlockPartition(
        layers=(f"{home}.{name}",),
        parts={base[0]: f"{home}.{base[1]}"},
        block=lambda block, x, shared: block(x, **shared),
        end=lambda model, x: getattr(sys.modules["transformers.modeling_outputs"], output)(logits=logits(model, x)),
        find_problem=lambda model: "set is_decoder=False" if getattr(model.config, "is_decoder", False) else None,
        **options,
    )


def _share_of_decoder(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Positions and causal mask, which each stage computes from the arguments of the model."""
    input_ids, attention_mask, position_ids = _arguments(model, args, kwargs, _DECODER)
    position_ids = _positions(input_ids, position_ids)
    mask = _make_mask("create_causal_mask", model, input_ids, attention_mask, position_ids)
    return {"attention_mask": mask, "position_ids": position_ids}


def _share_llama(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    shared = _share_of_decoder(model, *args, **kwargs)
    like = next(p for p in model.model.layers.parameters() if p.is_floating_point())
    like = like.new_empty(0, dtype=compute_dtype(like))  # has the dtype and device of the angles
    return shared | {"position_embeddings": model.model.rotary_emb(like, position_ids=shared["position_ids"])}


HUGGING_FACE_LLAMA_STAGES = _stages(
    "llama.LlamaForCausalLM",
    ("model", "LlamaModel"),
    "CausalLMOutputWithPast",
    lambda model, x: model.lm_head(model.model.norm(x)),
    blocks="model.layers",
    begin=lambda model, *args, **kwargs: model.model.embed_tokens(_arguments(model, args, kwargs, _DECODER)[0]),
    end_uses=("model.norm", "lm_head"),
    share=_share_llama,
    shared_uses=("model.rotary_emb",),
)


def _begin_gpt2(model: Any, *args: Any, **kwargs: Any) -> Any:
    input_ids, _, position_ids = _arguments(model, args, kwargs, _DECODER)
    decoder = model.transformer
    return decoder.drop(decoder.wte(input_ids) + decoder.wpe(_positions(input_ids, position_ids)))


HUGGING_FACE_GPT2_STAGES = _stages(
    "gpt2.GPT2LMHeadModel",
    ("transformer", "GPT2Model"),
    "CausalLMOutputWithCrossAttentions",
    lambda model, x: model.lm_head(model.transformer.ln_f(x)),
    blocks="transformer.h",
    begin=_begin_gpt2,
    end_uses=("transformer.ln_f", "lm_head"),
    share=_share_of_decoder,
)


def _begin_bert(model: Any, *args: Any, **kwargs: Any) -> Any:
    input_ids, _, token_type_ids, position_ids = _arguments(model, args, kwargs, _ENCODER)
    return model.bert.embeddings(input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids)


def _share_bert(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    input_ids, attention_mask, *_ = _arguments(model, args, kwargs, _ENCODER)
    return {"attention_mask": _make_mask("create_bidirectional_mask", model, input_ids, attention_mask)}


_BERT: Any = {"base": ("bert", "BertModel"), "blocks": "bert.encoder.layer", "begin": _begin_bert, "share": _share_bert}
HUGGING_FACE_BERT_CLASSIFICATION_STAGES = _stages(
    "bert.BertForSequenceClassification",
    output="SequenceClassifierOutput",
    logits=lambda model, x: model.classifier(model.dropout(model.bert.pooler(x))),
    end_uses=("bert.pooler", "dropout", "classifier"),
    **_BERT,
)
HUGGING_FACE_BERT_MASKED_STAGES = _stages(
    "bert.BertForMaskedLM", output="MaskedLMOutput", logits=lambda model, x: model.cls(x), end_uses=("cls",), **_BERT
)
