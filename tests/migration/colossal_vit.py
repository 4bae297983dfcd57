"""The Vision Transformer of Colossal-AI's page on mixed precision: its calls, on a tiny model and made data.

Imports are Colossal-AI's; the test renames them as docs/migration/colossal-ai.md says, and nothing else.
"""

import os
from pathlib import Path

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.trainer import Trainer, hooks
from colossalai.utils import get_current_device, get_dataloader
from timm.models import VisionTransformer
from torchvision import datasets, transforms

parser = colossalai.get_default_parser()
parser.add_argument("--use_trainer", action="store_true")
args = parser.parse_args()

colossalai.launch_from_torch(config=args.config)
logger = get_dist_logger()

model = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=10)
image = transforms.Compose([transforms.Resize(16), transforms.ToTensor()])
train_dataset = datasets.FakeData(size=36, image_size=(3, 16, 16), num_classes=10, transform=image)
test_dataset = datasets.ImageFolder(Path(os.environ["DATA"]), transform=image)
train_dataloader = get_dataloader(
    dataset=train_dataset, shuffle=True, batch_size=gpc.config.BATCH_SIZE, num_workers=0, pin_memory=False
)
test_dataloader = get_dataloader(dataset=test_dataset, batch_size=gpc.config.BATCH_SIZE, pin_memory=False)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
criterion = torch.nn.CrossEntropyLoss()
lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=2, total_steps=20)

engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
    model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler
)

if args.use_trainer:
    trainer = Trainer(engine=engine, logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=False),
        hooks.AccuracyHook(accuracy_func=lambda output, target: (output.argmax(1) == target).sum()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LogMemoryByEpochHook(logger),
        hooks.SaveCheckpointHook(checkpoint_dir="checkpoints"),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
else:
    for epoch in range(gpc.config.NUM_EPOCHS):
        engine.train()
        for img, label in train_dataloader:
            img = img.to(get_current_device())
            label = label.to(get_current_device())
            engine.zero_grad()
            output = engine(img)
            train_loss = engine.criterion(output, label)
            engine.backward(train_loss)
            engine.step()
            lr_scheduler.step()

        engine.eval()
        correct = total = 0
        for img, label in test_dataloader:
            with torch.no_grad():
                output = engine(img.to(get_current_device()))
            correct += (output.argmax(1) == label.to(get_current_device())).sum().item()
            total += len(label)
        logger.info(f"epoch {epoch}: loss {train_loss.item():.5f}, right {correct} of {total}", ranks=[0])

if gpc.get_global_rank() == 0:
    state = {name: value.float() for name, value in engine.model.state_dict().items()}
    torch.save({"weights": state, "lr": optimizer.param_groups[0]["lr"], "steps": engine.global_step}, "outcome.pt")
