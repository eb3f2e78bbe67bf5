"""Models over the ranks of a mesh, the usual way: what `--mesh dp=8,tp=4` does to built-ins and `hf:` models.

- `dimensions`: what the names of a mesh's dimensions mean (`MeshDimensions`)
- `layout`: what has to be known of an architecture to divide it (`Layout`)
- `local_parts`: a forward that computes with the local parts of its parameters
- `tensor_styles`: ways to divide a module that torch does not have: fused projections, experts, copies
- `exchanged_experts`: experts of which each rank has some, whole
- `tensor_plans`: the standard tensor-parallel plan of each built-in family
- `built_in_layout`: the layouts of the built-in families
- `divided_sequence`: sequences of which each rank has a part
- `unit_grain`: which modules FSDP gathers as units
- `data_parallel`: FSDP2, HSDP, DDP
- `pipeline`: stages of blocks, and the step that runs them one forward, one backward
- `parallel_step`: all of it around a model, as one training step
"""
