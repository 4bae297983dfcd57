"""Memory of activations: computed again in backward (checkpoint), or kept on the host until then (offload)."""
