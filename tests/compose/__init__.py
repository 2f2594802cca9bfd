"""A real cluster of containers, on a Docker Engine: `make test-compose`."""
