"""Pipeline and tensor parallelism in 2D, in full precision: 2 stages, each layer of which is divided in 2.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --config configs/pipeline_tensor_fp32.py

One copy of the model on 4 ranks; on 8 ranks two copies. Neighbours, ranks 0 and 1 and ranks 2 and 3, divide the layers
of one stage: they have the most to send to each other. The pipeline_tensor_ configs of other precisions import the
layout from here.
"""

from fp32 import *

parallel = dict(
    pipeline=dict(
        size=2,
        microbatches=4,  # see pipeline_fp32.py
        keep_outputs=True,  # for the training accuracy of train_vit.py: see pipeline_fp32.py
    ),
    tensor=dict(
        size=2,  # see tensor_fp32.py
        sequence_parallel=True,  # see data_tensor_fp32.py
    ),
)
