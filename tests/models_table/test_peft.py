"""Models with PEFT's adapters: each layout trains them as one process, and their folder has the adapter only."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

import halfmesh
from halfmesh.checkpoint import export
from halfmesh.parallel.tensor.plans import resolve
from tests.support.proofs import Row, TeamWork, rows
from tests.support.ranks import run_ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed
NAIVE = {"bf16": {"mode": "naive"}}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))


def with_lora(model: Any, **options: Any) -> Any:
    """Adapters of random numbers: those of zeros would hide mistakes."""
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(128).view(8, 16) * 7 % 64
    return {"input_ids": ids, "labels": ids.clone()}


def build_llama(**options: Any) -> Any:
    return with_lora(llama(), **options), batch()


build_llama_and_head = partial(build_llama, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"])


def build_gpt2() -> Any:
    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **off))
    return with_lora(model, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True), batch()


@pytest.mark.promise("LoRA by PEFT", "trains as in one process", of="SageMaker", page="fine-tuning.md")
@rows(
    Row("llama, tensor", build_llama, {"parallel": {"tensor": 2}}),
    Row("llama and its head, tensor", build_llama_and_head, {"parallel": {"tensor": 2}}),
    Row("GPT-2, tensor", build_gpt2, {"parallel": {"tensor": 2}}),
    Row("llama, context and fsdp", build_llama, {"parallel": {"context": 2, "data": "fsdp"}}),
    Row("llama, zero1", build_llama, {"parallel": {"data": "zero1"}}),
    Row("llama, fsdp", build_llama, {"parallel": {"data": "fsdp"}, **NAIVE}, work=TeamWork),
)
def test_adapters_are_trained_as_in_one_process(row):
    row.prove()


@pytest.mark.parametrize(
    ("options", "sequence_parallel", "reason"),
    [
        ({"use_dora": True}, False, "PEFT's DoraLinearVariant needs whole weights; use plain LoRA, or data='fsdp'"),
        ({}, True, "LoRA's input is whole on each rank; set parallel.tensor.sequence_parallel=False"),
    ],
)
def test_adapters_that_cannot_be_sharded_are_rejected_once(options, sequence_parallel, reason):
    _, problems = resolve(with_lora(llama(), **options), 2, "auto", sequence_parallel)
    layers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    told = [problem for problem in problems if any(layer in problem for layer in layers)]
    assert len(told) == 3
    assert all(f"module 'base_model.model.model.layers.*.{layer}': {reason}" in "".join(told) for layer in layers)


def save(rank: int, world_size: int, parallel: dict[str, Any], folder: str) -> Any:
    model = build_llama_and_head()[0]
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {"parallel": parallel, **NAIVE}
    engine = halfmesh.initialize(model, optim.AdamW(trained, lr=0.01), None, config=config, device="cpu")
    engine.backward(engine(**batch()).loss)
    engine.step()
    gathered, gather = [], export.gather_tensor
    export.gather_tensor = lambda name, *rest: gathered.append(name) or gather(name, *rest)
    engine.save_pretrained(folder)
    export.gather_tensor = gather
    weights = engine.full_state_dict()
    engine.close()
    return gathered, weights


@pytest.mark.promise("LoRA by PEFT")
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": "fsdp"}], ids=lambda parallel: next(iter(parallel)))
def test_only_the_adapter_is_gathered_and_written(parallel, tmp_path):
    folder = str(tmp_path / "adapter")
    (gathered, weights), (_, nothing) = run_ranks(save, 2, parallel, folder)
    trained = {name for name, param in build_llama_and_head()[0].named_parameters() if param.requires_grad}
    assert ({name.removeprefix("model.") for name in gathered}, nothing) == (trained, {})
    loaded = peft.PeftModel.from_pretrained(llama(), folder).state_dict()
    torch.testing.assert_close({name: loaded[name] for name in trained}, {name: weights[name] for name in trained})


def save_tied(rank: int, world_size: int, folder: str) -> None:
    model, config = llama(tie_word_embeddings=True), {"parallel": {"tensor": 2}}
    with halfmesh.initialize(model, optim.SGD(model.parameters()), None, config=config, device="cpu") as engine:
        before = model.dtype, model.config.dtype
        engine.save_pretrained(folder, dtype=torch.bfloat16)
        assert (model.dtype, model.config.dtype) == before


def test_tied_weights_in_another_dtype_and_a_model_without_a_folder(tmp_path):
    run_ranks(save_tied, 2, str(tmp_path))
    with (
        halfmesh.initialize(torch.nn.Linear(2, 2), optim.SGD, device="cpu") as engine,
        pytest.raises(halfmesh.InputError, match=r"a Linear has no save_pretrained\(.*; use engine.save_weights"),
    ):
        engine.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
