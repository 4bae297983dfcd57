"""What a config needs, before it runs: one rank of each kind does an update on tensors without memory.

In reading order: `model_spec` (the user's model and batch), `tracker` (bytes and messages, seen at torch's operators),
`simulate_rank` (one update of one rank), `dry_run` (all kinds of ranks, by `workers`), `rungs` (the changes of a config
that are tried) and `ladder` (the first that fits), `show` and `show_ladder` (output), `writing` (configs as files),
`holdings` and `picture` (which rank has what).

Imports assembly, config, parallel and what is below them; only cli and report import it.
"""
