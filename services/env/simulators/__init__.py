"""Simulators: one small interface, the registry of task names, and the worker processes that run them."""
