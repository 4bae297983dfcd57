"""The registries of axes, data strategies, tensor styles and plans, partitioners and schedules."""

from __future__ import annotations

from typing import Any

from ..utils.registry import Registry

AXES: Registry[Any] = Registry("parallel axis", "halfmesh.axes")
DATA_STRATEGIES: Registry[Any] = Registry("data strategy", "halfmesh.data_strategies")
TENSOR_STYLES: Registry[Any] = Registry("tensor style", "halfmesh.tensor_styles")
TENSOR_PLANS: Registry[Any] = Registry("tensor plan", "halfmesh.tensor_plans")
PARTITIONERS: Registry[Any] = Registry("partitioner", "halfmesh.partitioners")
SCHEDULES: Registry[Any] = Registry("pipeline schedule", "halfmesh.schedules")

AXES.register_lazy("tensor", "halfmesh.parallel.tensor.apply:TensorParallelism")
AXES.register_lazy("pipeline", "halfmesh.parallel.pipeline.axis:PipelineParallelism")
AXES.register_lazy("context", "halfmesh.parallel.context.axis:ContextParallelism")
AXES.register_lazy("expert", "halfmesh.parallel.expert:ExpertParallelism")
for _name, _strategy in {
    "replicate": "data_strategy:DataStrategy",
    "zero1": "sharding.zero1:Zero1",
    "fsdp": "sharding.fsdp:FSDP",
}.items():
    DATA_STRATEGIES.register_lazy(_name, f"halfmesh.parallel.{_strategy}")
_STYLES = (
    "colwise fused_colwise colwise_gather rowwise rowwise_split vocab vocab_parallel embedding_features "
    "embedding_gather heads config_heads rows latent_keys off attention sequence sequence_begin sequence_end region"
)
for _name in _STYLES.split():  # "fused_colwise" is FusedColwise
    TENSOR_STYLES.register_lazy(_name, f"halfmesh.parallel.tensor.styles:{_name.title().replace('_', '')}")
TENSOR_STYLES.register_lazy("partial", "halfmesh.parallel.tensor.styles:Sequence")

_PLANS = {
    "torch_and_timm": "torch_attention torch_encoder torch_layer torchvision_block "
    "timm_attention timm_mlp timm_glu_mlp timm_swiglu timm_block timm_vit",
    "transformers": "hugging_face gpt2_attention gpt2_mlp bert_attention bert_layer t5_attention t5_mlp",
}
BUILTIN_TENSOR_PLANS = frozenset(" ".join(_PLANS.values()).split())
for _file, _names in _PLANS.items():
    for _name in _names.split():
        TENSOR_PLANS.register_lazy(_name, f"halfmesh.parallel.models.{_file}:{_name.upper()}")

for _name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"):
    _constant = _name.upper().replace("1F1B", "ONE_F_ONE_B")
    SCHEDULES.register_lazy(_name, f"halfmesh.parallel.pipeline.schedules:{_constant}")

_PARTITIONERS = {
    "torch_and_timm": "sequential timm_vit",
    "transformers": "hugging_face_llama hugging_face_gpt2 hugging_face_bert_classification hugging_face_bert_masked",
}
for _file, _names in _PARTITIONERS.items():
    for _name in _names.split():
        PARTITIONERS.register_lazy(_name, f"halfmesh.parallel.models.{_file}:{_name.upper()}_STAGES")
