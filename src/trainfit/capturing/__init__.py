"""Capture: run one training step on tensors without memory, and write down what happened as a `Trace`.

The files, in the order in which a step passes through them:

session          builds the step, runs it under all of the others, and returns the trace
steps            how often the step runs, and which run is recorded
python_state     what Python code may decide by, and so may make runs differ; with `python_parts`
growth           memory that grows from run to run; `lbfgs`, whose history does
lent_tensors     the step of a running program: its tensors are lent to the capture, and given back
python_rollback  all other state of such a program, put back as it was; `stopped_iterators` are what cannot be
left_as_found    what was there before a capture, so that nothing of it is left behind
random_stream    random numbers come out as in a real run
interrupts       Ctrl-C waits while functions are replaced, and for destructors
replacing        sets attributes for a while and puts the originals back
boundaries       where modules, backward and optimizers begin and end
patches          Python functions of torch that are replaced during a capture
compiler         compiled code runs eagerly; `compiled` notices that it was called
disk             no tensors are written, and older files stay as they are
processes        workers run ordinary Python
explaining       errors that only a capture raises
refusals         steps that cannot be captured
distributed      one rank of a cluster, without the other processes
own_gpu          which GPU of its node the process has
asked_device     what the step asks about its GPU
importing        what a file finds while it is imported for a capture
retarget         a capture on CPU tensors behaves as on a GPU
composites       operators of torch that take another path under a dispatch mode
derivatives      backward formulas of torch that do
dispatch         the dispatch mode: every operator call passes here
engine           what backward does in place
schemas          what an operator's schema says about it
metadata         what a call returns; `own_kernels` where torch's fake kernel is missing or wrong
handlers         operators that need more than metadata; `sparse` for sparse tensors
plain_tensors    the plain tensors that a tensor consists of
values           which values are known, and what is assumed; `known_masks` for large masks
waiting          where the host waits for the device
without_operators  what Python code does to tensors without an operator call
exchanges        what is exchanged with other processes
mixing           operators that get tensors of the GPU and of the host
hollow           tensors without memory; `hollow_results` makes those that an operator returns
ledger           every storage, who holds it, and when it is freed
autograd         saved tensors, and the module of each backward node
modules          names of modules
queues           on which queue an operator runs, and what it waits for
recorder         the ops and storages of one run, as they happen
rows             what it keeps of each
counting         FLOPs and bytes of every operator
describing       which step it is: parameters, dtypes, optimizer
categories       what each storage is
assemble         puts the trace together
observed_calls   what an observation notes of module calls
observing        the second way in: follows code that runs anyway, on real or fake tensors
"""

from trainfit.capturing.session import capture

__all__ = ["capture"]
