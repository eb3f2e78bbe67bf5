"""A `Plan`: which parts of a model are checkpointed, op by op, and what that promises.

decisions        what can be done with the results of an op
plan             the plan itself
recomputation    which ops of a region run again in backward, and which results are kept for it
compiled_plan    what the graphs of a compiled step keep: the plan that torch.compile carries out
plan_store       plans of both kinds on disk
ways             a plan with what else is changed in a step
way_store        those on disk
sharding_choice  a plan with what is decided about FSDP's units, and its file
plan_origin      what a plan was made for, and in what another step or model differs
"""
