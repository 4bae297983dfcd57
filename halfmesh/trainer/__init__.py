"""A training loop over the engine, with hooks. Everything it does is a public call of `halfmesh.Engine`."""
