"""A `Trace`: one steady training step as plain data, its replay, and its file.

settings         which step it is, in the words that people use: batch, dtype, optimizer, model
assumptions      what had to be assumed, as data
step_runs        which run of the step is recorded, what was seen of the others
ranks            `Cluster`: which rank of how many a step is
memory_model     what bytes asked for become on a device: exactly these, or whole blocks
arguments        operator arguments as JSON text
trace            the trace itself
trace_check      its invariants, in words
trace_events     every allocation and free in order, as an allocator would be given them
simulate         replays the trace: bytes alive during every op, the peak
trace_store      traces on disk
"""
