"""The shape of Hugging Face's run_clm_no_trainer.py: grouped texts, Accelerate, a schedule in updates, perplexity.

    python examples/own_loop/clm_before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/clm_before.py

clm_after.py is the same with halfmesh. Text, tokenizer and model are made here, so nothing is downloaded. Needs
transformers and accelerate.
"""

import argparse
import json
import math
import os
from itertools import chain

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    default_data_collator,
    get_scheduler,
)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--model-type", default="llama")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--per-device-batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--num-train-epochs", type=int, default=2)
    parser.add_argument("--max-train-steps", type=int)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--num-warmup-steps", type=int, default=2)
    parser.add_argument("--output-dir")
    return parser.parse_args()


def make_tokenizer():
    """Each byte is a token."""
    words = {word: number for number, word in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def group_texts(examples, block_size):
    """The texts one after another, in blocks of one size; the rest is dropped."""
    ids = list(chain(*examples))
    blocks = [ids[i : i + block_size] for i in range(0, len(ids) // block_size * block_size, block_size)]
    return [{"input_ids": block, "labels": block.copy()} for block in blocks]


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(0)

    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[args.model_type](vocab_size=len(tokenizer) + 1, **sizes)  # an even number
    model = AutoModelForCausalLM.from_config(config)

    raw = {"train": [f"{n} times {m} is {n * m}." for n in range(13) for m in range(10)]}
    raw["validation"] = [f"{n} plus {n} is {2 * n}." for n in range(30)]
    tokenized = {split: [tokenizer(text)["input_ids"] for text in texts] for split, texts in raw.items()}
    datasets = {split: group_texts(examples, args.block_size) for split, examples in tokenized.items()}
    batches = {"collate_fn": default_data_collator, "batch_size": args.per_device_batch_size}
    train_dataloader = DataLoader(
        datasets["train"], shuffle=True, generator=torch.Generator().manual_seed(0), **batches
    )
    eval_dataloader = DataLoader(datasets["validation"], **batches)

    no_decay = ["bias", "norm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)

    num_update_steps_per_epoch = math.ceil(
        len(train_dataloader) / accelerator.num_processes / args.gradient_accumulation_steps
    )
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        "linear",
        optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    completed_steps = 0
    for epoch in range(math.ceil(args.max_train_steps / num_update_steps_per_epoch)):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                accelerator.print(f"step {completed_steps}: loss {loss:.6f} lr {lr_scheduler.get_last_lr()[0]:.3e}")
            if completed_steps >= args.max_train_steps:
                break

        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
        eval_loss = torch.mean(torch.cat(losses)).item()
        perplexity = math.exp(eval_loss)
        accelerator.print(f"epoch {epoch}: eval loss {eval_loss:.6f} perplexity {perplexity:.6f}")

    if args.output_dir is not None:
        accelerator.wait_for_everyone()
        unwrapped_model = accelerator.unwrap_model(model)
        unwrapped_model.save_pretrained(
            args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
        if accelerator.is_main_process:
            tokenizer.save_pretrained(args.output_dir)
            with open(os.path.join(args.output_dir, "all_results.json"), "w") as file:
                json.dump({"perplexity": perplexity}, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
