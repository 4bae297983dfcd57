"""Memory of activations: recomputed in backward (checkpoint), or kept on the host until then (offload)."""
