"""How a step grows with its batch or its sequence, and the largest that fits. Without torch.

trace_growth     a trace of another size, worked out from captured ones
rank_growth      the same for a rank among more or fewer ranks
size_search      the largest size that fits, with few questions
size_lists       `max` and lists as they are typed: `1,2,4,8`
size_results     what is found: the size, what it needs, and throughput over sizes
"""
