"""Health: watches every role, and starts again in place what failed, and only that."""
