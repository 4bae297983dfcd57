"""What halfmesh knows of each library's models: how their layers are sharded over tensor ranks (`LayerPlan`), and how
they are split into the stages of a pipeline (`BlockPartition`). Classes are named, not imported.

torch_nn, timm, torchvision, transformers      a library each
"""
