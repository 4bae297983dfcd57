"""Memory and communication of a config, from a dry run: one rank of each kind does an update on tensors without memory.

In reading order: `model_spec` (the user's model and batch), `tracker` (counts bytes and messages in torch's operators),
`simulate_rank` (one update of one rank), `dry_run` (all kinds of ranks, by `workers`), `rungs` (the changes to try)
and `ladder` (the first that fits), `show` (output, and a picture of the modules on each rank), `show_ladder`, and
`writing` (configs as files).

It imports the engine, and report for its drawing; only cli and verify import it.
"""
