"""Reinforcement learning: from trajectories to one pass over them."""
