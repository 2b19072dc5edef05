"""Kubernetes: manifests from a configuration, and the commands that pods run in addition to Ray."""
