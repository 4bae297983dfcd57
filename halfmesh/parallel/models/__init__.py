"""What halfmesh knows of the models of timm, torch.nn, torchvision and transformers. Their classes are named, not
imported.

layer_plans, model_plans       tensor plans
pipelines, transformers_pipeline       how models are cut into stages
"""
