"""The registries of the parallel room."""

from __future__ import annotations

from typing import Any

from ..registry import Registry


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
TENSOR_STYLES.register_lazy("attention", "halfmesh.parallel.tensor.attention:Attention")
BUILTIN_TENSOR_PLANS = {
    "timm_attention": "layer_plans",
    "timm_mlp": "layer_plans",
    "timm_glu_mlp": "layer_plans",
    "timm_swiglu": "layer_plans",
    "timm_block": "layer_plans",
    "timm_vit": "layer_plans",
    "torch_attention": "layer_plans",
    "torch_encoder": "layer_plans",
    "torch_encoder_layer": "layer_plans",
    "torch_decoder_layer": "layer_plans",
    "hugging_face": "layer_plans",
    "torchvision_vit_block": "model_plans",
    "torchvision_swin_block": "model_plans",
    "gpt2_attention": "model_plans",
    "gpt2_mlp": "model_plans",
    "bert_attention": "model_plans",
    "bert_layer": "model_plans",
    "t5_attention": "model_plans",
    "t5_mlp": "model_plans",
    "t5_gated_mlp": "model_plans",
}
"""Those that halfmesh brings, and the modules that have them."""
for _name, _module in BUILTIN_TENSOR_PLANS.items():
    TENSOR_PLANS.register_lazy(_name, f"halfmesh.parallel.models.{_module}:{_name.upper()}")
for _name, _schedule in {"gpipe": "GPIPE", "1f1b": "ONE_F_ONE_B", "interleaved": "INTERLEAVED"}.items():
    SCHEDULES.register_lazy(_name, f"halfmesh.parallel.pipeline.schedules:{_schedule}")
for _name, _partition in {
    "sequential": "pipelines:SEQUENTIAL",
    "timm_vit": "pipelines:TIMM_VIT",
    "hugging_face_llama": "transformers_pipeline:LLAMA",
    "hugging_face_gpt2": "transformers_pipeline:GPT2",
    "hugging_face_bert_classification": "transformers_pipeline:BERT_CLASSIFICATION",
    "hugging_face_bert_masked": "transformers_pipeline:BERT_MASKED",
}.items():
    PARTITIONERS.register_lazy(_name, f"halfmesh.parallel.models.{_partition}")
