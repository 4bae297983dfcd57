"""Pipeline parallelism with 2 stages on each of 2 ranks, in full precision: less waiting, more messages.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/interleaved_fp32.py

As pipeline_fp32.py, but cut into 4 stages: rank 0 has the first and the third, rank 1 the second and the fourth. A
rank's first work is there after a quarter of the model, not after half of it. The interleaved_ configs of other
precisions import the layout from here.
"""

from fp32 import *

parallel = dict(
    pipeline=dict(
        size=2,
        schedule="interleaved",
        chunks=2,  # stages on each rank. Waiting is (size - 1) / (chunks * microbatches + size - 1) of a step; here 1/9
        microbatches=4,  # a multiple of `size`, which this schedule needs
        keep_outputs=True,  # for the training accuracy of train_vit.py: see pipeline_fp32.py
    ),
)
