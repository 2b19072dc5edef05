"""A day of 10,000 GPUs in cells: demand of a trace's shape, autoscaling, faults and the loss of a zone."""
