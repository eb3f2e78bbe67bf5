"""Steps of many processes: one rank of a cluster is captured, and no other process exists.

rank_environment  the variables that torchrun sets
fake_groups       process groups of any size, on torch's backend `fake`
shard_sizes       how large a parameter is on all ranks together
"""
