"""Train a Vision Transformer in the precision and layout that a config chooses.

    python examples/train_vit.py --config configs/torch_bf16.py
    torchrun --standalone --nproc-per-node 2 examples/train_vit.py --config configs/naive_fp16.py
    torchrun --standalone --nproc-per-node 8 examples/train_vit.py --config configs/three_d.py
    torchrun --standalone --nproc-per-node 8 examples/train_vit.py --config configs/vit_base_caltech101.py \
        --data caltech101 --data-root ~/data --download

--set changes keys of the config: --set parallel.tensor=2 --set NUM_EPOCHS=3.
Without --data it learns the digits that come with scikit-learn: nothing to download, seconds on a CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from timm.models.vision_transformer import VisionTransformer
from torch import nn, optim
from torch.distributed.elastic.multiprocessing.errors import record
from vit_data import DATA_SETS, MissingDataError, VitData, limit, load_data
from vit_report import Meter, Report

import halfmesh

ROOT = Path(__file__).resolve().parent.parent


def parse_args() -> argparse.Namespace:
    """halfmesh's own options (--config and those of the launchers), and those of this script."""
    parser = halfmesh.get_default_parser()
    parser.description = "Train a Vision Transformer."
    parser.set_defaults(config=str(ROOT / "configs" / "naive_fp16.py"))
    parser.add_argument("--data", choices=DATA_SETS, default="digits", help="the data set (default: digits)")
    parser.add_argument("--data-root", type=Path, help="where the data sets are (default: $DATA, else ./data)")
    parser.add_argument("--download", action="store_true", help="fetch missing files into the data root")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a timm ViT (not for digits, 8 x 8 pixels)")
    parser.add_argument("--image-size", type=int, default=224, help="what images are cropped to (not for digits)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that load images")
    parser.add_argument("--limit", type=int, help="use at most this many images of each set (for a quick try)")
    parser.add_argument("--log-every", type=int, default=10, help="batches between two looks at the device")
    parser.add_argument("--out", type=Path, help="the picture (default: runs/<config>/training.png)")
    parser.add_argument("--min-accuracy", type=float, help="fail if the test accuracy, in per cent, stays below")
    return parser.parse_args()


def prepare_data(args: argparse.Namespace, launch: halfmesh.Launch) -> VitData:
    """The data set; with --download, fetched by one process of each machine while the others wait."""
    root = (args.data_root or Path(os.environ.get("DATA", "data"))).expanduser().resolve()
    if args.download and launch.local_rank == 0:
        load_data(args.data, root, args.image_size, download=True)
    if args.download and launch.world_size > 1:
        dist.barrier()
    data = load_data(args.data, root, args.image_size)
    data = data if args.limit is None else limit(data, args.limit)
    images, size = len(data.train), launch.config.BATCH_SIZE  # type: ignore[arg-type]  # all sets have a length
    if not count_updates(images, launch.config, launch.world_size):
        raise MissingDataError(
            f"{images} training images are no whole batch of {size} for each data rank, and a pipeline is not given "
            f"less; use --set BATCH_SIZE= with less than {size}, or a --limit that leaves more images"
        )
    return data


def build_model(args: argparse.Namespace, classes: int) -> nn.Module:
    """A small ViT for digits (four patches of 4 x 4 pixels, 0.1 M parameters), else timm's `--model`."""
    if args.data != "digits":
        model: nn.Module = timm.create_model(args.model, num_classes=classes, img_size=args.image_size)
        return model
    return VisionTransformer(
        img_size=8,
        patch_size=4,
        in_chans=1,
        num_classes=classes,
        embed_dim=64,
        depth=3,
        num_heads=4,
        mlp_ratio=2.0,
        class_token=False,
        global_pool="avg",
    )


def drops_last(config: halfmesh.Config) -> bool:
    """Whether training leaves out an epoch's last batch if it is short: a few images may be no number of microbatches
    that the pipeline's schedule takes."""
    stages: int = config.parallel.pipeline.size
    return stages > 1


def count_updates(images: int, config: halfmesh.Config, world_size: int) -> int:
    """Optimizer updates per epoch."""
    data_ranks = world_size // (config.parallel.tensor.size * config.parallel.pipeline.size)
    share = math.ceil(images / data_ranks)
    batches = share // config.BATCH_SIZE if drops_last(config) else math.ceil(share / config.BATCH_SIZE)
    return math.ceil(batches / config.gradient_accumulation)


def build_engine(args: argparse.Namespace, launch: halfmesh.Launch, data: VitData) -> Any:
    """Model, optimizer, data and scheduler, made into an engine."""
    config = launch.config
    options = {"batch_size": config.BATCH_SIZE, "num_workers": args.workers, "seed": config.seed}
    updates = count_updates(len(data.train), config, launch.world_size)  # type: ignore[arg-type]  # all sets have a length
    model = build_model(args, data.classes)
    optimizer = optim.AdamW(
        model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY, eps=config.ADAM_EPS
    )
    return halfmesh.initialize(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        halfmesh.get_dataloader(data.train, shuffle=True, drop_last=drops_last(config), **options),
        launch,
        eval_dataloader=halfmesh.get_dataloader(data.test, **options),
        lr_scheduler=halfmesh.LinearWarmupLR(
            optimizer, warmup_steps=config.WARMUP_EPOCHS * updates, total_steps=config.NUM_EPOCHS * updates
        ),
    )


def train_epoch(engine: Any, epoch: int, report: Report, log_every: int) -> None:
    """One pass over the training set."""
    engine.train()
    meter = Meter(engine)
    batches = len(engine.dataloader)
    for batch, (images, labels) in enumerate(engine.dataloader, start=1):
        engine.zero_grad()
        output = engine(images)
        loss = engine.criterion(output, labels)
        engine.backward(loss)
        engine.step()

        meter.add(loss, output, labels)
        due = batch % log_every == 0 and batches - batch >= log_every  # a short rest joins what is before it
        if due or batch == batches:
            done = meter.batches
            report.training(meter.take(epoch + batch / batches), done)


@torch.no_grad()
def evaluate(engine: Any) -> float:
    """Accuracy on the test set in per cent, in the precision that is trained in."""
    engine.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=engine.context.device)  # right, seen
    for images, labels in engine.eval_dataloader:
        output = engine(images)
        if engine.context.counts_outputs:  # of the ranks that compute a batch together, one that has its output
            hits = (output.argmax(1) == labels).sum()
            counts += torch.stack([hits, torch.full_like(hits, len(labels))])
    engine.context.all_reduce(counts)
    right, seen = counts.tolist()
    return 100 * right / seen


def train(engine: Any, args: argparse.Namespace, report: Report) -> float:
    """All epochs; the last test accuracy in per cent."""
    accuracy = 0.0
    for epoch in range(engine.config.NUM_EPOCHS):
        train_epoch(engine, epoch, report, args.log_every)
        accuracy = evaluate(engine)
        report.test(epoch + 1, engine.global_step, accuracy)
    return accuracy


@record  # torchrun's closing summary then shows the error of the rank that failed first
def main() -> None:
    args = parse_args()
    if args.data == "digits":
        torch.set_num_threads(1)  # more would only wait for each other: the images have 64 pixels
    with halfmesh.launch_from_torch(halfmesh.load_config(args.config, args.overrides), device=args.device) as launch:
        is_main = launch.rank == 0
        try:
            data = prepare_data(args, launch)
        except MissingDataError as error:
            sys.exit(str(error) if is_main else 1)
        with build_engine(args, launch, data) as engine:
            report = Report(engine.config.NUM_EPOCHS, len(engine.dataloader), shown=is_main)
            begin = time.perf_counter()
            try:
                accuracy = train(engine, args, report)
            finally:
                report.close()
            seconds = time.perf_counter() - begin
            name = Path(args.config).stem
            picture = args.out or Path("runs", name, "training.png")
            facts = {"config": name, "seed": engine.config.seed, "test_accuracy": accuracy, "seconds": seconds}
            report.write(picture, f"{args.data}, {name}, ranks: {launch.world_size}", facts)
    if is_main:
        print(f"trained in {seconds:.0f} s; wrote {picture}\ntest accuracy: {accuracy:.1f} %", flush=True)
    if args.min_accuracy is not None and accuracy < args.min_accuracy:
        sys.exit(f"the test accuracy is below --min-accuracy {args.min_accuracy:g} %" if is_main else 1)


if __name__ == "__main__":
    main()
