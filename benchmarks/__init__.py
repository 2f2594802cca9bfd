"""Measurements that anybody can repeat: `python -m benchmarks.<name> [--quick]` writes `results/<name>.json`."""
