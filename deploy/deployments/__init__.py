"""The Ray Serve deployments: each is a thin shell around a service that runs without Ray too."""
