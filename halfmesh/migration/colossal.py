"""Colossal-AI's legacy config.py, and apex's arguments of `amp.initialize`."""

from .table import AS_HERE, CONTEXT, FSDP, MICROBATCHES, OFFLOAD, STAGES, TENSOR, ZERO, Origin, Values, lost, no, to

_NAIVE = to({"fp16.mode": "naive"}, "the loss scale begins at 2**16, not 2**32, from where 20 updates or so are lost")
_OWN_LAYERS = "take Colossal-AI's own layers out of the model"


def _static(value: bool, values: Values) -> object:
    return to({"fp16.loss_scale": values.get("fp16.initial_scale")})  # None, which is refused, if it is missing


def _microbatches(value: int, values: Values) -> object:
    has_stages = max(values.get("parallel.pipeline", 1), values.get("parallel.pipeline.size", 1)) > 1
    return MICROBATCHES if has_stages else no("without a pipeline it has no effect: see gradient_accumulation")


def _zero(values: Values) -> dict[str, str]:
    """Colossal-AI's zero sharded everything, in fp16."""
    if not any(key.startswith("zero.") for key in values):
        return {}
    return ({} if "zero.level" in values else FSDP) | ({} if "fp16.mode" in values else {"fp16.mode": "naive"})


COLOSSAL = Origin(
    title="Colossal-AI",
    rows={
        "fp16.mode": {"naive": _NAIVE, "parallel": _NAIVE, "*": "fp16.mode"},
        "fp16.initial_scale": lambda value, values: (
            "fp16.loss_scale" if values.get("fp16.dynamic_grad_scale") is False else "fp16.initial_scale"
        ),
        "fp16.dynamic_grad_scale": {True: AS_HERE, False: _static},
        "fp16.hysterisis": "fp16.hysteresis",
        "fp16.clip_grad_norm": no("Colossal-AI put the top-level clip_grad_norm in its place; set that one"),
        "fp16.*": "fp16.*",
        "parallel.pipeline parallel.pipeline.size": (STAGES, "the loop stays as it is: there is no execute_schedule"),
        "NUM_MICRO_BATCHES schedule.num_microbatches": _microbatches,
        "parallel.tensor parallel.tensor.size": lambda value, values: (
            CONTEXT if values.get("parallel.tensor.mode") == "sequence" else (TENSOR, _OWN_LAYERS)
        ),
        "parallel.tensor.mode": {"1d": AS_HERE, "sequence": AS_HERE, "*": no("'1d' here: the same results")},
        "parallel.sequence.*": lost("write parallel = dict(context=...), see docs/context-parallel.md"),
        "parallel.data parallel.data.size": {-1: AS_HERE, "*": "parallel.data.size"},
        "zero.level": ZERO,
        "zero.model_config.tensor_placement_policy": OFFLOAD | {"cuda": AS_HERE, "auto": no("see cpu_offload")},
        "zero.optimizer_config.gpu_margin_mem_ratio zero.model_config.*": no("fsdp keeps each block's shards by rows"),
        "zero.optimizer_config.*": "fp16.*",
        "gradient_accumulation clip_grad_norm": "*",
        "gradient_handler torch_ddp.* fp16.?p_process_group TENSOR_SHAPE": no("it is automatic: remove it"),
        "seed": ("seed", "Colossal-AI ignored this key, and took the seed of launch (1024); here it counts"),
        "model.num_chunks": {1: AS_HERE, "*": no("see parallel.pipeline.schedule='interleaved' and chunks")},
        "model.* optimizer.* loss.* lr_scheduler.* train_data.* test_data.* dataset.* schedule.* hooks.* cudnn_* "
        "logging.*": no("it belongs to your script: halfmesh builds nothing from the config"),
    },
    needs=(
        ("fp16.growth_* fp16.backoff_factor fp16.hyst* fp16.m??_scale", "fp16.dynamic_grad_scale", True, True),
        ("zero.optimizer_config.*", "fp16.mode", None, None),
    ),
    always=_zero,
)
APEX = Origin(
    title="apex.amp.initialize",
    rows={"num_losses": ("fp16.num_losses", "give engine.backward amp.scale_loss's loss_id"), "*": "fp16.*"},
    always=lambda values: {"fp16.mode": "apex"},
    look="'apex' is for one process or data parallelism; 'torch' is close to O1, 'naive' is O2 with an fp16 BatchNorm",
)
