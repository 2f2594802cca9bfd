"""The trainer role: policies in memory, one shared backbone, one private step a policy."""
