"""The journal: what the master may not forget, in one SQLite file."""
