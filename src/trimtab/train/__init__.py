"""Training: the step, the loop round it, the schedules it follows, and the one place that builds them in order."""
