"""Single operators run and timed on the device at hand, as they would run in the step they come from.

`locality` says where an op of the step finds its memory, `values` which values its inputs have, `memory`
puts the inputs there, and `rounds` runs the operators in turn and times them. `host` times what Python and
autograd take around the operators of small steps (`samples`), `regions` what the executor of plans takes, and
`rates` what the machine can do at best. `load` says how much other work the machine had meanwhile.
"""
