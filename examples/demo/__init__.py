"""The demo: from demonstrations to two measured policies, on a cluster of its own. `make demo`, or `python -m
examples.demo`.
"""
