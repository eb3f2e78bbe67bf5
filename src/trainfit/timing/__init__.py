"""Single operators run and timed on the device at hand, as they would run in the step they come from.

In the order in which an operator passes through them:

- `locality`: where an op of the step finds its memory (near, in the last cache, in main memory)
- `memory`: memory for the inputs, and ways to have it there
- `input_values`: which values the inputs have
- `caller`: one operator with its arguments, ready to be called again and again
- `clocks`: how one call is timed, on a CPU or a GPU
- `rounds`: all operators in turn, as often as the time allows
- `bench`: the way in: times for the distinct operators of a step

What else is measured on this machine:

- `samples`: small steps that are run as a whole
- `host`: what Python, the dispatcher and autograd take around the operators of those steps
- `distributed_seconds`: what Python of DTensor and FSDP2 takes besides, in the step of a rank
- `executor_seconds`: what running a region under a plan takes
- `rates`: FLOP/s and bytes per second at best
- `load`: how busy the machine was with other work meanwhile
"""
