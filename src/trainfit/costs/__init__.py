"""Costs: seconds per operator on a device, by roofline or measured, and when each op of a step runs."""
