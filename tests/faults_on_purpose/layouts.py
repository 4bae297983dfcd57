"""Layouts that faults are put into, and patterns of the places that verify may name."""

from __future__ import annotations

from tests.composition.cells import Cell, Pipe

PIPE = Pipe(2, "1f1b", 2)
LLAMA_TENSOR, GPT_TENSOR, MLP_TENSOR, VIT_TENSOR = (
    Cell("none", model, tensor=2) for model in ("llama", "gpt", "mlp", "vit")
)
GPT_SEQUENCE = Cell("none", "gpt", tensor=2, sequence_parallel=True)
MLP_PIPE, GPT_PIPE = (Cell("none", model, pipeline=PIPE) for model in ("mlp", "gpt"))
GPT_CONTEXT, LLAMA_CONTEXT = (Cell("none", model, context=2) for model in ("gpt", "llama"))
EXPERTS = Cell("none", "mixtral", data=2, expert=2)
DATA, TWICE = Cell("none", data=2), Cell("none", data=2, gradient_accumulation=2)
GPT_DATA = Cell("none", "gpt", data=2)
ZERO1, FSDP = Cell("none", data=2, strategy="zero1"), Cell("none", "gpt", data=2, strategy="fsdp")
TORCH_FP16, NAIVE_FP16, NAIVE_BF16 = (Cell(mode, data=2) for mode in ("torch_fp16", "naive_fp16", "naive_bf16"))
TORCH_FP16_TENSOR = Cell("torch_fp16", tensor=2)

CLIPPED, WEIGHTED = {"clip_grad_norm": 0.5}, {"loss_reduction": "weighted"}
GRADIENT, LOSS = "gradient *", "loss *"
UNLIKE = "rejected *differ between ranks that should hold the same*"
OTHERWISE = "rejected *compute something else*"


def after(name: str) -> str:
    """The output of a module whose inputs agree."""
    return f"output {name}; *its inputs agree*"


def before(name: str) -> str:
    """The caller's own code before a module, whose input differs."""
    return f"output *; * {name}, whose input*"


def grad(name: str) -> str:
    """The gradient of a module's output, which is made by what was given that."""
    return f"*; *the gradient of the output of {name} differs*"
