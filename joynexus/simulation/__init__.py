"""Simulators for whoever runs them: one interface, worker processes, episodes. Part of the wheel; without torch."""
