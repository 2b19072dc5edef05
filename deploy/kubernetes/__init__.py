"""What belongs to Kubernetes alone: manifests from a configuration, and what runs in pods beside Ray."""
