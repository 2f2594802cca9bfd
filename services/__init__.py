"""The roles: master, trainer, inference, env, health. None imports another."""
