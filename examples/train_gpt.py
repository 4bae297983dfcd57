"""Train a small GPT on text, byte by byte, in the precision and layout that a config chooses; then let it write.

    python examples/train_gpt.py --config configs/torch_bf16.py
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --config configs/tensor.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/pipeline.py
    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --config configs/three_d.py
    python examples/train_gpt.py --data my_texts/ --width 256 --depth 8 --context 256 --steps 500

--set changes keys of the config: --set parallel.tensor=2 --set NUM_EPOCHS=3.
Without --data it learns from the sources of Python's standard library: nothing to download, and in fp32 about 10 s on a
CPU. (Most CPUs emulate fp16: there it takes several times as long. bf16 is nearly as fast as fp32 on recent ones.)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT
from gpt_data import GPTData, MissingTextError, load_text
from gpt_report import Meter, Report, bits_per_byte
from torch import optim
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import RandomSampler

import halfmesh

ROOT = Path(__file__).resolve().parent.parent


def parse_args() -> argparse.Namespace:
    """halfmesh's own options (--config and those of the launchers), and those of this script."""
    parser = halfmesh.get_default_parser()
    parser.description = "Train a small GPT on text, byte by byte."
    parser.set_defaults(config=str(ROOT / "configs" / "torch_bf16.py"))
    parser.add_argument("--data", type=Path, help="a text file or a folder (default: Python's standard library)")
    parser.add_argument("--max-bytes", type=whole, default=2_000_000, help="read no more than this (default: 2 MB)")
    parser.add_argument("--context", type=whole, default=64, help="bytes that the model sees (default: 64)")
    parser.add_argument("--width", type=whole, default=64, help="features of each byte (default: 64)")
    parser.add_argument("--depth", type=whole, default=2, help="blocks (default: 2)")
    parser.add_argument("--heads", type=whole, default=4, help="attention heads of each block (default: 4)")
    parser.add_argument("--dropout", type=share, default=0.1, help="share of activations dropped (default: 0.1)")
    parser.add_argument("--steps", type=whole, default=10, help="updates in each epoch (default: 10)")
    parser.add_argument("--validation-windows", type=whole, default=128, help="of the held-out text (default: 128)")
    parser.add_argument("--log-every", type=whole, default=10, help="updates between two looks at the device")
    parser.add_argument("--prompt", default="def ", help="what the sample begins with (default: 'def ')")
    parser.add_argument("--sample", type=int, default=200, help="bytes to write after training (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sample: lower is safer (default: 0.8)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--out", type=Path, help="the picture (default: runs/gpt_<config>/training.png)")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not divisible by --heads {args.heads}")
    if args.temperature <= 0 or not args.prompt:
        parser.error("--temperature must be above 0, and --prompt not empty: the first byte is drawn after it")
    return args


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1 (without 1)")
    return number


def windows_per_epoch(steps: int, config: halfmesh.Config, world_size: int) -> int:
    """Windows that all ranks need together for `steps` updates."""
    data_ranks = world_size // (config.parallel.tensor.size * config.parallel.pipeline.size)
    windows: int = steps * config.gradient_accumulation * config.BATCH_SIZE * data_ranks
    return windows


def next_byte_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats: what the model has computed, or that of logits [batch, length, 256], which it returns
    in evaluation and from a pipeline, against bytes [batch, length]."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten()) if output.dim() else output


def build_engine(args: argparse.Namespace, launch: halfmesh.Launch, data: GPTData) -> Any:
    """Model, optimizer, data and scheduler, made into an engine."""
    config = launch.config
    model = GPT(args.context, args.width, args.depth, args.heads, args.dropout)
    optimizer = optim.AdamW(
        model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY, eps=config.ADAM_EPS
    )
    # Text has no natural epoch: each one draws windows that begin anywhere, and as many as its updates need.
    sampler = RandomSampler(
        data.train,
        replacement=True,
        num_samples=windows_per_epoch(args.steps, config, launch.world_size),
        generator=torch.Generator().manual_seed(config.seed),
    )
    return halfmesh.initialize(
        model,
        optimizer,
        next_byte_loss,
        halfmesh.get_dataloader(data.train, batch_size=config.BATCH_SIZE, sampler=sampler, seed=config.seed),
        launch,
        eval_dataloader=halfmesh.get_dataloader(data.validation, batch_size=config.BATCH_SIZE, seed=config.seed),
        lr_scheduler=halfmesh.LinearWarmupLR(
            optimizer, warmup_steps=config.WARMUP_EPOCHS * args.steps, total_steps=config.NUM_EPOCHS * args.steps
        ),
    )


def train_epoch(engine: Any, epoch: int, report: Report, log_every: int) -> None:
    """The updates of one epoch."""
    engine.train()
    meter = Meter(engine)
    batches = len(engine.dataloader)
    for batch, (ids, targets) in enumerate(engine.dataloader, start=1):
        engine.zero_grad()
        output = engine(ids, targets=targets)
        loss = engine.criterion(output, targets)
        engine.backward(loss)
        engine.step()

        meter.add(loss, targets)
        if meter.updates == log_every or batch == batches:
            done = meter.batches
            report.training(meter.take(epoch + batch / batches), done)


@torch.no_grad()
def evaluate(engine: Any) -> float:
    """Mean loss on the validation windows, in nats per byte and in the precision that is trained in."""
    engine.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=engine.context.device)  # loss, windows
    for ids, targets in engine.eval_dataloader:
        output = engine(ids)
        if engine.context.is_last_stage:  # of a pipeline only these ranks have the output
            loss = engine.criterion(output, targets).double()
            sums += torch.stack([loss * len(ids), torch.full_like(loss, len(ids))])
    engine.context.all_reduce(sums, "dp")  # each data rank has seen its own part
    engine.context.all_reduce(sums, "pp")
    total, windows = sums.tolist()
    return total / windows


@torch.no_grad()
def generate(engine: Any, prompt: bytes, count: int, context: int, temperature: float) -> bytes:
    """`prompt` and `count` more bytes, each drawn from what the model expects. All ranks have to call it.

    They get the same: the model gives the same on all that have its output, these draw with one seed, and of a
    pipeline the last stage tells the others.
    """
    engine.eval()
    generator = torch.Generator().manual_seed(engine.config.seed)
    text = list(prompt)
    for _ in range(count):
        seen = text[-context:]
        # Always a whole window, which sequence parallelism can divide; no prediction looks at the zeros after it.
        ids = torch.tensor([seen + [0] * (context - len(seen))], device=engine.context.device)
        output, drawn = engine(ids), torch.zeros(1, dtype=torch.int64)
        if engine.context.is_last_stage:
            logits = output[0, len(seen) - 1].float().cpu() / temperature
            logits = logits.nan_to_num()  # a model that has diverged writes nonsense, and the run is kept
            drawn = torch.multinomial(logits.softmax(0), 1, generator=generator)
        engine.context.broadcast(drawn, "pp", engine.context.last_stage)
        text.append(int(drawn))
    return bytes(text)


def readable(text: bytes) -> str:
    """Text for a terminal: what is no character, or would control the terminal, is shown as such."""
    characters = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters)


def train(engine: Any, args: argparse.Namespace, report: Report) -> float:
    """All epochs; the last validation loss."""
    loss = float("nan")
    for epoch in range(engine.config.NUM_EPOCHS):
        train_epoch(engine, epoch, report, args.log_every)
        loss = evaluate(engine)
        report.test(epoch + 1, engine.global_step, loss)
    return loss


@record  # torchrun's closing summary then shows the error of the rank that failed first
def main() -> None:
    args = parse_args()
    with halfmesh.launch_from_torch(halfmesh.load_config(args.config, args.overrides), device=args.device) as launch:
        is_main = launch.rank == 0
        try:
            data = load_text(args.data, args.context, args.max_bytes, args.validation_windows)
        except MissingTextError as error:
            sys.exit(str(error) if is_main else 1)
        if is_main:
            print(f"text: {data.size:,} bytes, files: {data.files}", flush=True)
        with build_engine(args, launch, data) as engine:
            report = Report(engine.config.NUM_EPOCHS, len(engine.dataloader), shown=is_main)
            begin = time.perf_counter()
            try:
                loss = train(engine, args, report)
            finally:
                report.close()
            seconds = time.perf_counter() - begin
            sample = readable(generate(engine, args.prompt.encode(), args.sample, args.context, args.temperature))
            name = Path(args.config).stem
            picture = args.out or Path("runs", f"gpt_{name}", "training.png")
            facts = {
                "config": name,
                "seed": engine.config.seed,
                "validation_loss": loss,
                "bits_per_byte": bits_per_byte(loss),
                "seconds": seconds,
                "sample": sample,
            }
            report.write(picture, f"GPT, {name}, ranks: {launch.world_size}", facts)
    if is_main:
        print(f"a sample:\n{sample}\n")
        print(f"trained in {seconds:.0f} s; wrote {picture}\n{report.test_text(loss)}", flush=True)


if __name__ == "__main__":
    main()
