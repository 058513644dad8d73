"""Real servers for one machine, from pip packages: loopback only, no root needed, no containers.

Each server keeps its data, its configuration (with its secrets, readable by its owner only) and its log in
one folder, and can be opened there again later; ports are new each time.
"""

from pipeline.errors import LocalServerError, ServerDidNotStart, ServerNotInstalled
from pipeline.local_servers.postgres import Postgres, postgres
from pipeline.local_servers.process import LocalServer
from pipeline.local_servers.seaweedfs import SeaweedFS, seaweedfs
from pipeline.local_servers.valkey import Valkey, valkey

__all__ = [
    "LocalServer",
    "LocalServerError",
    "Postgres",
    "SeaweedFS",
    "ServerDidNotStart",
    "ServerNotInstalled",
    "Valkey",
    "postgres",
    "seaweedfs",
    "valkey",
]
