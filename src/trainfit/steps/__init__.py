"""A `Step`: what the user gives.

step             model, optimizer and `run()`
step_marks       what a run leaves behind in the step's tensors: nothing, if it did not train
"""
