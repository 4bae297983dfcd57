"""timm_before.py with halfmesh.

    python examples/own_loop/timm_after.py --set fp16.mode=torch
    torchrun --standalone --nproc-per-node 2 examples/own_loop/timm_after.py

Without --set it is fp32 on one process; --set or --config chooses another precision or layout. Needs timm.
"""

import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, accuracy, dispatch_clip_grad, random_seed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import halfmesh

BATCH_SIZE, GRAD_ACCUM_STEPS, CLIP_GRAD, EMA_DECAY = 16, 2, 0.02, 0.9  # a batch of all processes together


def make_dataset(count, seed):
    """Images with stripes that tell the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    waves = torch.sin(torch.arange(32.0) * (labels[:, None] + 1) * 0.15)
    return TensorDataset(waves[:, None, None] + 0.3 * torch.randn(count, 3, 32, 32, generator=generator), labels)


def ema_decay(step):
    """The warm-up of ModelEmaV3."""
    return min(1 - step ** (-2 / 3), EMA_DECAY)


def train_one_epoch(epoch, engine, model_ema, lr_scheduler, mixup_fn):
    engine.train()
    losses_m = AverageMeter()
    accum_steps = engine.config.gradient_accumulation
    for batch_idx, (input, target) in enumerate(engine.dataloader):
        need_update = batch_idx == len(engine.dataloader) - 1 or (batch_idx + 1) % accum_steps == 0
        input, target = mixup_fn(input, target)
        loss = engine.criterion(engine(input), target)
        engine.zero_grad()
        engine.backward(loss)
        if need_update:
            engine.unscale_gradients()
            dispatch_clip_grad(model_parameters(engine.model, exclude_head=True), CLIP_GRAD, mode="agc")
        model_ema.decay = ema_decay(engine.global_step + 1)
        engine.step()
        losses_m.update(loss.item(), len(input))
        if not need_update:
            continue
        num_updates = engine.global_step
        lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
        if engine.context.rank == 0:
            lr = engine.optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch} update {num_updates}: loss {losses_m.val:.6f} ({losses_m.avg:.6f}) lr {lr:.3e}")


@torch.no_grad()
def validate(engine, log_suffix=""):
    sums = torch.zeros(3, device=engine.device)
    engine.eval()
    for input, target in engine.eval_dataloader:
        output = engine(input)
        with engine.autocast():
            loss = F.cross_entropy(output, target)
        acc1 = accuracy(output, target)[0]
        sums += len(input) * torch.stack([loss, acc1, torch.ones_like(loss)])
    loss, acc1, count = engine.context.all_reduce(sums, "dp").tolist()
    if engine.context.rank == 0:
        print(f"test{log_suffix}: loss {loss / count:.6f} acc@1 {acc1 / count:.3f}")


def main():
    parser = halfmesh.get_default_parser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    config = halfmesh.load_config(args.config or {"gradient_accumulation": GRAD_ACCUM_STEPS}, args.overrides)
    launch = halfmesh.launch_from_torch(config)
    random_seed(42, launch.dp_rank)

    model = timm.create_model("test_vit", img_size=32, patch_size=8, embed_dim=32, depth=2, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)

    train_set, eval_set = make_dataset(144, 1), make_dataset(64, 2)
    sampler = DistributedSampler(train_set, launch.dp_size, launch.dp_rank)
    loader_train = DataLoader(train_set, BATCH_SIZE // launch.dp_size, sampler=sampler)
    loader_eval = DataLoader(eval_set, BATCH_SIZE // launch.dp_size)
    mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)

    updates_per_epoch = launch.updates_per_epoch(loader_train)
    lr_scheduler, num_epochs = create_scheduler_v2(
        optimizer, num_epochs=args.epochs, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=updates_per_epoch
    )
    engine = halfmesh.initialize(
        model, optimizer, SoftTargetCrossEntropy(), loader_train, launch, eval_dataloader=loader_eval
    )
    model_ema = engine.averaged_model(EMA_DECAY, buffers=True)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, engine, model_ema, lr_scheduler, mixup_fn)
        validate(engine)
        with model_ema.applied():
            validate(engine, log_suffix=" (EMA)")
        lr_scheduler.step(epoch + 1)
    engine.close()
    launch.close()


if __name__ == "__main__":
    main()
