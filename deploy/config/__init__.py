"""The configuration of a Spool application: one file, `spool.yaml`, read into one frozen tree."""
