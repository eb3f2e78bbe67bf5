"""Calibrate: measure a device of this machine, and make a device file of what was measured.

- `probes`: the microbenchmarks, in groups
- `instrument`: the device that is measured, its clock, and sizes that fit
- `probing`: runs groups of probes in rounds, smaller ones where memory runs out
- `solving`: captures the probes and finds the constants with which the roofline agrees with the clock
- `questions`: which probes decide which constant
- `answering`: all groups, and the rates and constants that they lead to
- `host_costs`: what the host takes per call, and how long a kernel takes to start
- `checking`: whole steps, predicted with what was measured and really run
- `calibration_result`: the result, and the device that comes of it
- `gauging`: all of it, in order
"""
