"""The master: accepts, journals, schedules and meters. It computes nothing itself and holds no model."""
