"""Plans for each library's models: they shard layers over tensor ranks (`LayerPlan`), and split models into the stages
of a pipeline (`BlockPartition`). Classes are named, not imported.

torch_and_timm (with torchvision), transformers, peft      the models of these libraries
"""
