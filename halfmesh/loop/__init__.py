"""When each thing happens in a step. `halfmesh/engine.py` stands above, with checkpoints and reports in between."""
