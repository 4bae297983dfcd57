"""Fine-tune a Hugging Face model with LoRA under fsdp, and write the adapter. Nothing is downloaded.

    python examples/finetune_llm.py
    torchrun --standalone --nproc-per-node 2 examples/finetune_llm.py
    torchrun --standalone --nproc-per-node 2 examples/finetune_llm.py --layout tensor --model FOLDER

Needs transformers and peft. Without --model it makes a tiny Llama and a tokenizer for bytes, in a temporary folder.
Prints losses, the same on any number of ranks and in each layout (within bf16's rounding), and what the model with the
adapter that was written gives.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import halfmesh

RANKS = int(os.environ.get("WORLD_SIZE", 1))
LAYOUTS = {"fsdp": dict(data="fsdp"), "tensor": dict(tensor=RANKS), "zero1": dict(data="zero1")}
parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder that save_pretrained has written, with its tokenizer")
parser.add_argument("--layout", choices=LAYOUTS, default="fsdp")
parser.add_argument("--out", default="runs/adapter")
args = parser.parse_args()
args.batch = 8 if args.layout == "tensor" else max(8 // RANKS, 1)  # 8 sentences per update in all


def make_model(folder: str) -> None:
    """Write a Llama with random weights, and a tokenizer for which each byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *alphabet])}  # 258: 2 ranks divide them
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)


made = tempfile.TemporaryDirectory()  # each rank makes its own, which is the same
folder = args.model or made.name
if not args.model:
    make_model(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
base, fresh = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))

torch.manual_seed(0)
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(base, lora)  # only the adapters are trained


def collate(questions: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """A batch, padded to one length; labels of -100 are not learnt."""
    batch = tokenizer([f"{n} times {m} is {n * m}." for n, m in questions], return_tensors="pt", padding="max_length",
                      max_length=24, truncation=True, return_token_type_ids=False)  # fmt: skip
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


questions: Any = [(n, m) for n in range(8) for m in range(8)]  # a Dataset to torch: it has a length and items
engine = halfmesh.initialize(
    model,
    torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=4e-3),
    None,  # the model returns its loss
    DataLoader(questions, batch_size=args.batch, collate_fn=collate),
    dict(bf16=dict(mode="torch"), parallel=LAYOUTS[args.layout], clip_grad_norm=1.0),
)
for epoch in range(3):
    total = 0.0
    for batch in engine.dataloader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        total += engine.context.all_reduce(loss.detach().clone(), "dp").item() / engine.context.dp_size
    if engine.context.rank == 0:
        print(f"epoch {epoch}: mean loss {total / len(engine.dataloader):.3f}")

engine.save_pretrained(args.out)  # all ranks together; PEFT writes its adapter only
engine.close()
if engine.context.rank == 0:
    tuned, batch = PeftModel.from_pretrained(fresh, args.out), collate(questions[:16])
    with torch.no_grad():
        after = tuned(**batch).loss
        with tuned.disable_adapter():
            before = tuned(**batch).loss
    print(f"{sorted(os.listdir(args.out))}: loss {before:.3f} without the adapter, {after:.3f} with it")
