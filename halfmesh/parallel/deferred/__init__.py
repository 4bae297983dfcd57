"""Models that are built without memory, and whose values are made late: of each only what a rank holds.

creation           the scopes that a user opens: deferred_init, model_creation
recording, tape    what a model's initialization computes, recorded and run again
adoption           tensors on the meta device that become those of a model
late               gives a rank the values of what it holds
"""
