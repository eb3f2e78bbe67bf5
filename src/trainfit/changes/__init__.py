"""Changes to a training step that need less memory or less time, each carried out on the step itself.

A change is made where the step is built, with the code that makes it in a real run: what it does to memory
and time is captured, not derived.

- `change`: `StepChange`, what each kind offers, and how exact results stay
- `unchanged_step`: what is known of a step before it is changed
- `updates_in_backward`, `accumulation`, `chunked_head` with `chunked_cross_entropy`: how larger ones are made
- `host_memory`, `step_in_parts`, `offloaded_state`, `offloaded_parameters`: what is kept on the host
- `least_copies`: what that copies at least
- `hidden_forward`: what takes the place of a module's `forward`, and gives it back
- `kinds/`: one file for each kind of change, found by its name
- `step_with_changes`: a target with changes
"""
