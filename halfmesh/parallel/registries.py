"""The registries of parallelism."""

from __future__ import annotations

from typing import Any

from ..utils.registry import Registry


def _no_plan(obj: Any) -> str | None:
    if isinstance(obj, type) or not callable(getattr(obj, "styles_in", None)):
        return f"{obj!r} is no tensor plan; expected a halfmesh.LayerPlan, or an object with its styles_in"
    return None


AXES: Registry[Any] = Registry("parallel axis", "halfmesh.axes")
DATA_STRATEGIES: Registry[Any] = Registry("data strategy", "halfmesh.data_strategies")
TENSOR_STYLES: Registry[Any] = Registry("tensor style", "halfmesh.tensor_styles")
TENSOR_PLANS: Registry[Any] = Registry("tensor plan", "halfmesh.tensor_plans", _no_plan)
PARTITIONERS: Registry[Any] = Registry("partitioner", "halfmesh.partitioners")
SCHEDULES: Registry[Any] = Registry("pipeline schedule", "halfmesh.schedules")

AXES.register_lazy("tensor", "halfmesh.parallel.tensor.apply:TensorParallelism")
AXES.register_lazy("pipeline", "halfmesh.parallel.pipeline.axis:PipelineParallelism")
AXES.register_lazy("context", "halfmesh.parallel.context.axis:ContextParallelism")
AXES.register_lazy("expert", "halfmesh.parallel.expert.axis:ExpertParallelism")
for _name, _strategy in {
    "replicate": "data_strategy:DataStrategy",
    "zero1": "sharding.zero1:Zero1",
    "fsdp": "sharding.fsdp:FSDP",
}.items():
    DATA_STRATEGIES.register_lazy(_name, f"halfmesh.parallel.{_strategy}")
for _name, _style in {
    "colwise": "Colwise",
    "fused_colwise": "FusedColwise",
    "colwise_gather": "ColwiseGather",
    "rowwise": "Rowwise",
    "rowwise_split": "RowwiseSplit",
    "vocab": "Vocab",
    "embedding_features": "EmbeddingFeatures",
    "embedding_gather": "EmbeddingGather",
    "heads": "Heads",
    "config_heads": "ConfigHeads",
    "rows": "Rows",
    "latent_keys": "LatentKeys",
    "off": "Off",
}.items():
    TENSOR_STYLES.register_lazy(_name, f"halfmesh.parallel.tensor.feature_styles:{_style}")
for _name, _style in {
    "partial": "Sequence",
    "sequence": "Sequence",
    "sequence_begin": "SequenceBegin",
    "sequence_end": "SequenceEnd",
    "region": "GatherSequence",
}.items():
    TENSOR_STYLES.register_lazy(_name, f"halfmesh.parallel.tensor.sequence_styles:{_style}")
TENSOR_STYLES.register_lazy("attention", "halfmesh.parallel.tensor.sequence_styles:Attention")
BUILTIN_TENSOR_PLANS = {
    "timm_attention": "timm:ATTENTION",
    "timm_mlp": "timm:MLP",
    "timm_glu_mlp": "timm:GLU_MLP",
    "timm_swiglu": "timm:SWIGLU",
    "timm_block": "timm:BLOCK",
    "timm_vit": "timm:VIT",
    "torch_attention": "torch_nn:ATTENTION",
    "torch_encoder": "torch_nn:ENCODER",
    "torch_encoder_layer": "torch_nn:ENCODER_LAYER",
    "torch_decoder_layer": "torch_nn:DECODER_LAYER",
    "hugging_face": "transformers:OWN_PLAN",
    "torchvision_vit_block": "torch_nn:VIT_BLOCK",
    "torchvision_swin_block": "torch_nn:SWIN_BLOCK",
    "gpt2_attention": "transformers:GPT2_ATTENTION",
    "gpt2_mlp": "transformers:GPT2_MLP",
    "bert_attention": "transformers:BERT_ATTENTION",
    "bert_layer": "transformers:BERT_LAYER",
    "t5_attention": "transformers:T5_ATTENTION",
    "t5_mlp": "transformers:T5_MLP",
    "t5_gated_mlp": "transformers:T5_GATED_MLP",
}
"""The built-in ones, and their modules in `models`."""
for _name, _plan in BUILTIN_TENSOR_PLANS.items():
    TENSOR_PLANS.register_lazy(_name, f"halfmesh.parallel.models.{_plan}")
for _name, _schedule in {
    "gpipe": "GPIPE",
    "1f1b": "ONE_F_ONE_B",
    "interleaved": "INTERLEAVED",
    "zero_bubble": "ZERO_BUBBLE",
    "zbv": "ZBV",
    "dualpipev": "DUALPIPEV",
}.items():
    SCHEDULES.register_lazy(_name, f"halfmesh.parallel.pipeline.schedules:{_schedule}")
for _name, _partition in {
    "sequential": "torch_nn:SEQUENTIAL_STAGES",
    "timm_vit": "timm:VIT_STAGES",
    "hugging_face_llama": "transformers:LLAMA_STAGES",
    "hugging_face_gpt2": "transformers:GPT2_STAGES",
    "hugging_face_bert_classification": "transformers:BERT_CLASSIFICATION_STAGES",
    "hugging_face_bert_masked": "transformers:BERT_MASKED_STAGES",
}.items():
    PARTITIONERS.register_lazy(_name, f"halfmesh.parallel.models.{_partition}")
