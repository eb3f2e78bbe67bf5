"""The real step beside what was predicted.

plan_comparison  runs a step with and without its plan and compares what both made
measuring        runs the real step: what it allocates, how long it takes, whether it was compiled
verification     real runs, guarded by the memory there is, beside what was predicted
way_verification  the same for a way that `fit` has found
compiled_verification  a compiled step, with and without a plan, and with torch's own budget

Several processes, which torchrun has started:

rank_links         sockets between them, for bytes outside of torch's memory
tensor_bytes       the memory of tensors for the exchange, and sums over ranks
silent_work        what a call of a process group returns
silent_group       the process group whose exchange the profiler does not see
silent_backend     puts it where the user's code asks for any process group
rank_control       what the processes tell each other besides
rank_measuring     runs the step of this rank, and measures it by phase
rank_verification  every rank, measured beside what was predicted
"""
