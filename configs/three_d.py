"""Data, pipeline and tensor parallelism in 3D, in bf16: 2 copies of 2 stages, each layer sharded over 2 ranks.

    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --config configs/three_d.py
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --config configs/three_d.py \
        --set parallel.data.size=null

Ranks 0 to 3 hold the first stage, ranks 4 to 7 the second; of each four the first two are one copy's. Neighbours
share the layers of one stage: they have the most to send to each other.
"""

from halfmesh import AMP_TYPE

bf16 = dict(mode=AMP_TYPE.NAIVE)
parallel = dict(
    data=dict(
        size=2,  # copies of the model; default: what the others leave. With it, any other number is rejected
        reduce_dtype="float32",  # the default: gradients are summed over the copies in fp32, whatever their own format
    ),
    pipeline=dict(
        size=2,
        microbatches=4,
        partition="auto",  # the default: halfmesh knows where to cut; examples/gpt.py teaches it the GPT
        keep_outputs=True,  # for the training accuracy of train_vit.py: see pipeline.py
        eval_outputs="last",  # the default: in evaluation only ranks with the last stage get the outputs
    ),
    tensor=dict(size=2, sequence_parallel=True),
)

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
