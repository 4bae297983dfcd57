"""Memory and communication of a config, from a dry run: one rank of each kind does an update on tensors without memory.

In reading order: `model_spec` (the user's model and batch), `tracker` (counts bytes and messages in torch's operators),
`simulate_rank` (one update of one rank), `dry_run` (all kinds of ranks), `candidates` (the changes to try, and configs
as files), `ladder` (the first that fits), and `show` (output, and a picture of the modules on each rank).

It imports the engine, and report for its drawing; only cli and verify import it.
"""
