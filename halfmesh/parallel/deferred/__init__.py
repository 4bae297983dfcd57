"""Models that are built without memory, and materialized late: of each tensor only what a rank holds.

creation                   the scopes that a user opens: deferred_init, model_creation
recording, operations      what a model's initialization computes, recorded and run again
meta                       the model on the meta device, before it is divided
materialize                gives a rank the values of what it holds
"""
