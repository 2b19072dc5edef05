"""What tools of others get from a server, compared with what it must be."""
