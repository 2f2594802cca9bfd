"""What a tenant's program uses: `connect`, and the handles it leads to. Light: no torch, one thread, two sockets."""

from joynexus.client._client import Client, connect
from joynexus.client._datasets import Datasets
from joynexus.client._jobs import Job
from joynexus.client._policy import Batch, Chunk, Policy

__all__ = ["Batch", "Chunk", "Client", "Datasets", "Job", "Policy", "connect"]
