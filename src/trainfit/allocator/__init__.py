"""torch's CUDA caching allocator, simulated: what a sequence of allocations reserves, and whether it runs.

allocator_options    the options, under torch's names
stand_in_device      bytes and addresses of a device
block_pools          blocks, chains of them, and the order of the free ones
stream_table         the order in which streams are looked at
allocator_state      rules as numbers, pools, counters
expandable_memory    pages of expandable segments
releasing            what is given back to the device, and when
caching_core         allocate and free
replay_loop          the loop over a sequence's events
fast_core            those from `stand_in_device` to here, compiled where that was possible
caching_allocator    the allocator with names, its statistics, running out of memory
event_sequence       sequences as data and as text
sequence_replay      what becomes of a sequence
capacity_search      the smallest capacity with which it runs
conf_strings         `PYTORCH_CUDA_ALLOC_CONF`
named_options        what `--allocator` says
training_steps       what is asked of the allocator, from before the first step on
step_columns         the same, made of columns of numbers: many times faster
placed_blocks        a steady step in memory, as plain data
first_fit            the plainest heap, where no allocator is simulated
placed_step          where every block of a steady step lies
device_memory        what a step takes of a device: allocated, reserved, the least with which it runs
__main__             `python -m trainfit.allocator`
"""

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.caching_allocator import AllocatorStatistics, CachingAllocator, OutOfMemory
from trainfit.allocator.capacity_search import CapacitySearch, search_capacity, smallest_capacity
from trainfit.allocator.conf_strings import parse_conf
from trainfit.allocator.event_sequence import (
    AllocationSequence,
    parse_sequence,
    read_sequence,
    sequence_text,
    write_sequence,
)
from trainfit.allocator.sequence_replay import AllocatorReplay, replay

__all__ = [
    "AllocationSequence",
    "AllocatorOptions",
    "AllocatorReplay",
    "AllocatorStatistics",
    "CachingAllocator",
    "CapacitySearch",
    "OutOfMemory",
    "parse_conf",
    "parse_sequence",
    "read_sequence",
    "replay",
    "search_capacity",
    "sequence_text",
    "smallest_capacity",
    "write_sequence",
]
