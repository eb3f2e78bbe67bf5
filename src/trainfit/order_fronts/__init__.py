"""Where graphs to order come from: FX graphs, joint graphs of steps, inductor's scheduler, captured traces.

`fx.py` turns an FX graph into a `BufferGraph` and back; `joint.py` traces a step's forward and backward into
one. `inductor.py` gives torch.compile our order; `scheduler_graph.py` reads inductor's scheduler,
`scheduler_memory.py` and `reuse.py` tell what compiled code allocates. `eager.py` asks what another order
could save in the step as it runs without a compiler. `order_result.py` takes whatever has a graph, and
returns its best order with where it came from.
"""
