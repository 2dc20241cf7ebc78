"""The same machines on a real network: drivers, transports, identities."""

import os

# gRPC writes a line to stderr for every connection that ends, unless it finds this when imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
