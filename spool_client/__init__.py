"""The gRPC API of Spool for clients."""
