"""From a launcher's environment to device, seeds and process group; and the end of all ranks when one has failed.

In reading order: `env` (what a launcher tells a process, how messages name a rank), `failures` (who failed first, and
the end of the others), `process_group`, `launch` (the public functions).

Imports `errors`, `log`, and in functions `config` and `compat`. Not called `launch`, which is a public function.
"""
