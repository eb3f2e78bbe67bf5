"""The real step beside what was predicted.

plan_comparison  runs a step with and without its plan and compares what both made
measuring        runs the real step: what it allocates, how long it takes, whether it was compiled
verification     real runs, guarded by the memory there is, beside what was predicted
"""
