"""From a launcher's environment to a process group; and the end of all ranks when one has failed.

In reading order: `env` (what a launcher tells a process, how messages name a rank), `failures` (who failed first, and
the end of the others), `process_group`; then `local_ranks` (ranks of this machine, for `verify`),
`rank_process` (what each of them does). The public functions are in `halfmesh/engine/launch.py`, above the config.

Imports `errors` and `utils`.
"""
