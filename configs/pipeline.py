"""Pipeline parallelism, in bf16: the model is split into 2 stages of whole layers, one after the other.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/pipeline.py \
        --set parallel.pipeline.schedule=interleaved --set parallel.pipeline.chunks=2

For models that are too large for one device. 2 ranks hold one copy of the model, half of the blocks each; 4 ranks
hold two such copies, and each copy sees its own shard of the data. The interleaved schedule gives each rank two
smaller stages (chunks): less waiting, more messages. --set bf16=null trains in fp32.
"""

from halfmesh import AMP_TYPE

bf16 = dict(mode=AMP_TYPE.TORCH)

# Which rank holds what. Data parallelism takes the ranks that are left: all of them / size.
parallel = dict(
    pipeline=dict(
        size=2,  # ranks that share one copy
        # A batch goes through the stages in so many pieces: while rank 1 works on one, rank 0 works on the next. More
        # of them shorten the waiting, of (size - 1) / (chunks * microbatches + size - 1) of a step; here 1/5. It has
        # to divide the batch.
        microbatches=4,
        schedule="1f1b",  # the default: a backward as soon as one can run, so that few activations wait for theirs
        # train_vit.py shows the accuracy on the training set, and so needs the outputs after backward. Leave it out
        # where the loss is enough, as in train_gpt.py: the outputs are sent to all stages.
        keep_outputs=True,
    ),
)

# Names in capitals are your own: halfmesh hands them through as config.NUM_EPOCHS and never looks at them.
NUM_EPOCHS = 20
BATCH_SIZE = 32  # images per data rank: with 2 ranks an update sees 64
LEARNING_RATE = 2e-3
WARMUP_EPOCHS = 2  # the learning rate rises from near 0 to LEARNING_RATE, then falls to 0
WEIGHT_DECAY = 0.05
ADAM_EPS = 1e-8  # torch's default
