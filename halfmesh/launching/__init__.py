"""From a launcher's environment to device, seeds and process group; and what ends all ranks when one has failed.

In reading order: `env` (what a launcher tells a process, how messages name a rank), `failures` (the watch over the other
ranks), `process_group`, `launch` (the public functions), `signals` (SIGTERM, for `checkpoint`).

Imports `errors`, `log`, and in functions `config` and `compat`. It is not called `launch`, which is a public function.
"""
