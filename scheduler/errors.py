"""What all errors have in common that Spool raises for reasons of its own."""


class SpoolError(Exception):
    """Base of all of them; the client, a distribution of its own, has others."""
