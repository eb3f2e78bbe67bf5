"""Costs: seconds per operator on a device, by roofline or measured, and when each op of a step runs.

- `table`: `CostTable`, what leaves this part
- `calibration`, `constants`, `tiling`, `product_rates`, `roofline`: seconds from FLOPs, bytes and shapes
- `collective_costs`: seconds of what GPUs exchange, from links and latencies
- `host_link`: seconds of copies between the host and a GPU
- `measured_exchanges`: the same as somebody measured it, where a device file has it
- `this_machine`, `measured_costs`: seconds measured on this machine, remembered for the next time
- `pricing`: one of the two for a trace and a device
- `contention`: by how much longer that takes which runs beside something else
- `schedule`: when each op runs, on the host and on the device
- `op_times`: when each op is issued and when it runs, for timelines
- `late_frees`: memory that the allocator gets back late, because a queue is behind
- `overlap`: which communication a step waits for, and behind what the rest of it hides
- `pipeline_times`: the step of several stages that wait for each other
- `summary`: where the time of a step goes
- `advised_seconds`: how long the step takes with what is advised to lower its peak
- `estimates`: what is predicted for a step on a device, as one result
"""
