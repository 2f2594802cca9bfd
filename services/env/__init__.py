"""The env role: data sets, simulators, and the producers that feed the queues from them."""
