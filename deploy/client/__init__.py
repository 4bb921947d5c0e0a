"""Python clients of a deployed application.

    >>> client = Client()                            # through Serve, inside `ray.init(address=...)`
    >>> client = Client("http://127.0.0.1:8000")     # over HTTP
    >>> client = Client("grpc://127.0.0.1:9000")     # over gRPC
    >>> client.generate("Once upon a time", max_tokens=20).text
    >>> for run in client.chat_stream([{"role": "user", "content": "Hi"}]):
    ...     print(run.text, end="")

`AsyncClient` is the same for asyncio, and for deployments that call Paceline's. `deploy.offline`
has an engine with the same methods and no server at all.
"""

from deploy.client.asynchronous import AsyncClient
from deploy.client.blocking import Client, Stream

__all__ = ["AsyncClient", "Client", "Stream"]
