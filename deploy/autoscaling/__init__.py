"""Autoscaling: the numbers of target and draft replicas follow the load that the scheduler reports."""
