"""Data, pipeline and tensor parallelism in 3D, in full precision: 2 copies of 2 stages, each layer divided in 2.

    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --config configs/data_pipeline_tensor_fp32.py

pipeline_tensor_fp32.py on 8 ranks, with each key spelled out. Ranks 0 to 3 hold the first stage, ranks 4 to 7 the
second; of each four the first two are one copy's. The data_pipeline_tensor_ configs of other precisions import the
layout from here.
"""

from fp32 import *

parallel = dict(
    data=dict(
        size=2,  # copies of the model; without it, what the others leave. With it, any other number of ranks is refused
        reduce_dtype="float32",  # the default: gradients are summed over the copies in fp32, whatever their own format
    ),
    pipeline=dict(
        size=2,
        microbatches=4,
        schedule="1f1b",  # the default: a backward as soon as one can run, so that few activations wait for theirs
        partition="auto",  # the default: halfmesh knows where to cut; examples/gpt.py teaches it the GPT
        keep_outputs=True,  # for the training accuracy of train_vit.py: see pipeline_fp32.py
        eval_outputs="all",  # the default: in evaluation every rank gets the outputs, not those of the last stage only
    ),
    tensor=dict(size=2, sequence_parallel=True),
)
