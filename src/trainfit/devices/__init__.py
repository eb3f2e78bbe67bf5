"""Memory and speed of devices, and what this machine says about itself.

architectures    what `sm_86` and `gfx942` mean, and which choose the same kernels
hardware         memory, free memory, statistics and events of this machine and its GPU
efficiency       `Constants`: how much of a datasheet a step gets, the general ones
device_table     the built-in table (`devices.json`), this machine, the user's file
library_handles  what cuBLAS and its like keep on a GPU from their first use on
communicator_buffers  what NCCL keeps on a GPU for each communicator
cluster_text     a cluster as people write it: `dp=8,tp=4`, `50GB/s`
distinct_ranks   which ranks of a cluster can need more or less than others
device_file      writes a device as such a file
measured_cache   what was measured on this machine, on disk
"""
