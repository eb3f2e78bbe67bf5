"""Plans that torch.compile carries out: which values of a joint graph are kept, and which computed again.

In the order in which a graph passes through them:

- `recompute_problem`: a joint graph as plain data, limits, and what a choice is
- `node_costs`: seconds and workspaces of FX nodes
- `joint_problem`: the joint graph of AOTAutograd as such a problem
- `graph_rows`: such a problem as lists of numbers
- `fused_runs`: what a compiler that fuses computes inside of other nodes
- `partition_judge`: what runs again for a choice, and when, and the bytes alive
- `value_worth`: which values of a choice are worth most
- `peak_relief`: which values to let go of, so that the peak is lower
- `price_network`: the cheapest choice for a price per byte, of one part
- `price_cuts`: the parts of a problem, each solved once
- `fast_partitions`: those from `graph_rows` to here, compiled where that was possible
- `partition_memory`: what choices of a problem need
- `partition_cuts`: the cheapest choice for a price per byte, and where forward is divided
- `cut_corners`: the prices at which the cheapest choice changes
- `pareto_front`: what no other choice beats
- `partition_swaps`: values kept in the place of others
- `partition_search`: the fastest choice within limits
- `torch_choices`: what torch's own partitioner would keep
- `split_graphs`: the graphs of forward and backward that torch compiles
- `kernel_workspaces`: what kernels of torch's own need inside of inductor's code
- `written_code`: what the code that inductor writes allocates and lets go
- `kernel_memory`: what inductor's code of a graph will need
- `backward_orders`: how far another order of backward lowers its peak
- `graph_planner`: one graph planned, divided and certified
- `step_shares`: how the graphs of a step share its memory
- `compile_plan`: what was planned, for whoever asks
- `remembered_plans`: what was planned for code that torch finds again
- `planned_partitioner`: the partitioner that torch.compile calls
- `graph_probe`: which graphs a model has, before it is compiled
- `standing_memory`: parameters, buffers and optimizer state
- `compiled_model`: `compile`
- `value_names`: values of a graph by what computes them
- `carried_plan`: plans made before, carried out by torch.compile
- `step_graphs`: the joint graphs of a step, without running it
- `kernel_calls`: the kernels that inductor makes of a graph, and their buffers
- `node_calls`: the same of a graph that runs node by node
- `graph_runs`: forward and backward of a divided graph so
- `compiled_parts`: where compiled modules are called in a step
- `compiled_trace`: the trace of a compiled step
- `compiled_step`: what a compiled step needs and takes, as torch divides it or within a budget
"""
