"""What a tenant's program uses: `connect`, and the handles it leads to. Light: no torch, one thread, two sockets.

`connect_async` leads to the same under asyncio.
"""

from joynexus.client._async import AsyncClient, AsyncDatasets, AsyncJob, AsyncPolicy, connect_async
from joynexus.client._client import Client, connect
from joynexus.client._datasets import Datasets
from joynexus.client._jobs import Job
from joynexus.client._packing import Batch, Chunk
from joynexus.client._policy import Policy

__all__ = [
    "AsyncClient",
    "AsyncDatasets",
    "AsyncJob",
    "AsyncPolicy",
    "Batch",
    "Chunk",
    "Client",
    "Datasets",
    "Job",
    "Policy",
    "connect",
    "connect_async",
]
