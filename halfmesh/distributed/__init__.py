"""Creates a process group from a launcher's environment, and ends all ranks when one fails.

In reading order: `env` (a launcher's variables, and the names of ranks in messages), `failures` (finds the rank that
failed first, and ends the others), `process_group`; then `local_ranks` (ranks on this machine, for `verify`). The
public functions are in `halfmesh/engine/launch.py`, above the config.

It imports only `errors` and `utils`.
"""
