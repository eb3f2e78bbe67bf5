"""PyTorch's own tools under their own names, as adapters over trainfit's parts: only the import changes.

Names are imported from the file that is called like torch's module; units are torch's, milliseconds and
bytes. docs/compat.md says what differs on purpose.

Modules and memory of code that runs, on real or on fake tensors (`torch.distributed._tools`):

mod_tracker         which modules run now
mem_tracker         memory by category and module call; `mem_states` has its states, categories and displays
fsdp2_mem_tracker   memory of FSDP2 modules by what FSDP adds; `fsdp2_mem_states` has its states
runtime_estimator   milliseconds of each module; `op_runtimes` of each op
sac_estimator       what checkpointing ops of a module trades; `sac_records`, `sac_readings`, `trade_off_fit`
observing_estimator  what the two estimators have in common
captured_step       one capture of a step for all of them
seen_calls          what they read: traces, and what is known of module calls besides
target_device       which device they work for
printed_tables      tables as PyTorch's tools print them

Planning by PyTorch's formulation:

tracker_readings    what memory trackers, of torch or of ours, have seen of each module
ilp_utils           statistics of all modules in one table, and the graph of them
sac_ilp             which modules to checkpoint within a budget, and which ops of one module
fake_collectives    process group and bytes of each collective

`inductor_memory.py` is `torch._inductor.memory`. It shows the names of `planning_info.py` (what planning
knows about buffers and nodes), `planning_checks.py` (cycles, names that occur twice), `scheduler_peaks.py`
(lifetimes and peaks), `scheduler_sorts.py` (orders) and `simulator_export.py` (the graph as JSON).
"""
