"""Steps of many processes: one rank of a cluster is captured, and no other process exists.

rank_environment  the variables that torchrun sets
fake_groups       process groups of any size, on torch's backend `fake`
one_process       what is replaced in `torch.distributed` while a capture runs
collective_calls  collectives, and what waits for them
sharding_kernels  FSDP2's own operators
sharded_units     which modules gather and reduce, and what holds their gathered parameters
conversions       local tensors that become distributed ones, and the other way round
ring_attention    context parallelism
lazy_chunks       no work per rank
shared_strategies  no work per parameter for what is the same for all of a kind
rank_messages     what ranks say to each other
object_messages   Python objects that they send
renewed_reducers  what reduces gradients in a program that goes on training
pipelines         stages of a pipeline, which do
"""
