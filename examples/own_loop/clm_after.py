"""clm_before.py with halfmesh.

    python examples/own_loop/clm_after.py --set bf16.mode=torch
    torchrun --standalone --nproc-per-node 2 examples/own_loop/clm_after.py --set parallel.data=fsdp

Without --set it is fp32 on one process; --set or --config chooses another precision or layout. Needs transformers.
"""

import json
import math
import os
from itertools import chain

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    default_data_collator,
    get_scheduler,
)

import halfmesh


def parse_args():
    parser = halfmesh.get_default_parser()
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
    keys = {"gradient_accumulation": args.gradient_accumulation_steps}
    launch = halfmesh.launch_from_torch(halfmesh.load_config(args.config or keys, args.overrides), seed=0)

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

    num_update_steps_per_epoch = launch.updates_per_epoch(train_dataloader)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        "linear",
        optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=args.max_train_steps,
    )
    engine = halfmesh.initialize(
        model, optimizer, None, train_dataloader, launch, eval_dataloader=eval_dataloader, lr_scheduler=lr_scheduler
    )

    for epoch in range(math.ceil(args.max_train_steps / num_update_steps_per_epoch)):
        engine.train()
        total_loss = 0
        for batch in engine.dataloader:
            loss = engine(**batch).loss
            total_loss += loss.detach().float()
            engine.backward(loss)
            if engine.step() is not None and launch.rank == 0:
                lr = engine.lr_scheduler.get_last_lr()[0]
                print(f"step {engine.global_step}: loss {loss:.6f} lr {lr:.3e}")
            engine.zero_grad()
            if engine.global_step >= args.max_train_steps:
                break

        engine.eval()
        losses = []
        for batch in engine.eval_dataloader:
            with torch.no_grad():
                loss = engine(**batch).loss
            losses.append(loss.repeat(len(batch["input_ids"])))
        losses = engine.context.gather(torch.cat(losses))
        eval_loss = torch.mean(losses).item()
        perplexity = math.exp(eval_loss)
        if launch.rank == 0:
            print(f"epoch {epoch}: eval loss {eval_loss:.6f} perplexity {perplexity:.6f}")

    if args.output_dir is not None:
        engine.save_pretrained(args.output_dir)
        if launch.rank == 0:
            tokenizer.save_pretrained(args.output_dir)
            with open(os.path.join(args.output_dir, "all_results.json"), "w") as file:
                json.dump({"perplexity": perplexity}, file)
    engine.close()
    launch.close()


if __name__ == "__main__":
    main()
