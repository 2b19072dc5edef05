"""The autoscaling policy: how many draft and target replicas hold the latency target at least cost."""
