"""Pipeline parallelism, in full precision: the model is cut into 2 stages of whole layers, one after the other.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/pipeline_fp32.py

For models that are too large for one device. 2 ranks hold one copy of the model, half of the blocks each; 4 ranks hold
two such copies, and each copy sees its own part of the data. The pipeline_ configs of other precisions import the
layout from here.
"""

from fp32 import *

# Which rank holds what. Data parallelism takes the ranks that are left: all of them / `size`.
parallel = dict(
    pipeline=dict(
        size=2,  # ranks that share one copy
        # A batch goes through the stages in so many parts: while rank 1 works on one, rank 0 works on the next. More
        # of them shorten the waiting, of (size - 1) / (microbatches + size - 1) of a step; here 1/5. It has to divide
        # the batch.
        microbatches=4,
        # train_vit.py shows the accuracy on the training set, and so needs the outputs after backward. Leave it out
        # where the loss is enough, as in train_gpt.py: the outputs are sent to all stages.
        keep_outputs=True,
    ),
)
