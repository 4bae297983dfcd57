"""Keys of other libraries: one of these in a config is answered with the key to use here."""

from __future__ import annotations

import types
from collections.abc import Mapping

FOREIGN_KEYS: Mapping[str, str] = types.MappingProxyType(
    {
        # halfmesh, earlier
        "balance": "remove it: stages are balanced by parameters, and parallel.pipeline.partition names other cuts",
        # Colossal-AI
        "num_micro_batches": "set parallel.pipeline.microbatches instead",
        "zero": "set parallel.data = 'zero1' or 'fsdp' instead",
        # SageMaker's model parallel library
        "pipeline_parallel_degree": "set parallel.pipeline.size instead",
        "partitions": "set parallel.pipeline.size instead",
        "tensor_parallel_degree": "set parallel.tensor.size instead",
        "sharded_data_parallel_degree": "set parallel.data = dict(strategy='fsdp') instead",
        "shard_optimizer_state": "set parallel.data = 'zero1' instead",
        "static_loss_scale": "set fp16.loss_scale to that number instead (mode 'naive')",
        "dynamic_loss_scale": "set fp16.loss_scale = 'dynamic' instead (mode 'naive')",
        "dynamic_loss_args": "set growth_interval (scale_window), min_scale and hysteresis (delayed_shift) "
        "in fp16 instead (mode 'naive')",
        "scale_window": "set growth_interval instead",
        "delayed_shift": "set hysteresis instead",
        "optimize": "remove it: halfmesh has no such choice; parallel.pipeline.partition says how stages are cut",
        "pipeline_parallelism": "set parallel.pipeline.size instead",
        "offload_activations": "set activation_offload instead",
        # scripts in plain PyTorch
        "amp": "set fp16 = dict(mode='torch') or bf16 = dict(mode='torch') instead",
        "dtype": "set fp16 = dict(mode='torch') or bf16 = dict(mode='torch') instead",
        "batch_size": "give it to the DataLoader: the batch size of one data rank",
        # Lightning, accelerate, transformers, DeepSpeed
        "precision": "set fp16 = dict(mode='torch') or bf16 = dict(mode='torch') instead",
        "mixed_precision": "set fp16 = dict(mode='torch') or bf16 = dict(mode='torch') instead",
        "max_grad_norm": "set clip_grad_norm instead",
        "grad_clip": "set clip_grad_norm instead",
        "gradient_clipping": "set clip_grad_norm instead",
        "gradient_clip_val": "set clip_grad_norm instead",
        "accumulate_grad_batches": "set gradient_accumulation instead",
        "gradient_accumulation_steps": "set gradient_accumulation instead",
        "train_batch_size": "set global_batch_size instead",
        "zero_optimization": "set parallel.data = 'zero1' or 'fsdp' instead",
        "gradient_handler": "remove it: halfmesh reduces gradients automatically; see parallel.data",
        "fsdp": "set parallel.data = 'fsdp' instead",
        "tensor_parallel": "set parallel.tensor instead",
        "pipeline_parallel": "set parallel.pipeline instead",
        "data_parallel": "remove it: data parallelism takes the ranks that tensor and pipeline leave",
        "ddp": "remove it: data parallelism takes the ranks that tensor and pipeline leave; parallel.data.strategy "
        "is 'replicate' by default",
    }
)
"""Keys of other libraries, lower case, and what to write here."""
