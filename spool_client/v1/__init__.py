"""Messages and stubs of spool.v1, generated from protos/spool/v1."""
