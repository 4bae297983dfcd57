"""Shared helpers: parameters as shards (`param_shard`), the state of optimizers (`optimizer_state`), trees of tensors
(`tensors`), registries (`registry`), the base class of hooks on an engine's loop (`engine_hook`), logging (`log`), and
private torch names (`torch_private`).

It imports only `errors`.
"""
