"""ViT-Base/16 on Caltech101, for GPUs: mode NAIVE in fp16, with the numbers of a larger training.

    torchrun --standalone --nproc-per-node 8 examples/train_vit.py --config configs/vit_base_caltech101.py \
        --data caltech101 --data-root ~/data --download --workers 8

The numbers are a start, not the outcome of a search.
"""

from halfmesh import AMP_TYPE

fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 100
BATCH_SIZE = 64  # images per data rank; lower it if memory runs out, and raise gradient_accumulation instead
LEARNING_RATE = 5e-4
WARMUP_EPOCHS = 10  # Vision Transformers trained from nothing need a slow start
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
