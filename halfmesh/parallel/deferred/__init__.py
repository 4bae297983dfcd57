"""Models that are built without memory, and materialized late: of each tensor only what a rank holds.

recording   what a model's initialization computes, recorded and run again
creation    the scopes that a user opens: deferred_init, model_creation; the model on the meta device, and its values
"""
