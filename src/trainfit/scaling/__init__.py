"""On how many GPUs, with which mesh: the best division of a model for each size of a cluster.

scale_text        world sizes, a global batch and dimensions as people write them
mesh_candidates   the meshes that a number of ranks can form, and how the batch is divided among them
scale_question    what is asked about, and how one capture of it is requested
captures_ahead    captures, half of them made by a second process before they are asked for
shape_captures    the few captures that all meshes are worked out from: a shallow model, few sizes
stage_measures    what a step without stages says about those of a pipeline
depth_figures     bytes and seconds of a step, carried on to the model's whole depth
checkpoint_curve  what less memory costs in recomputation
one_forward_one_backward  when the stages of a pipeline run
pipeline_steps    memory and time of those stages, with their bubble
mesh_judge        what one mesh needs and how fast it is, worked out
mesh_search       the best mesh of one world size, without a look at all of them
why_slower        why another mesh loses
confirming        the winner captured whole, and its plan certified
scale_rows        what was found out, as a reader sees it
winners           the best of each size, and which of them are confirmed
found_scale       what is found, with its text, its JSON and its tables
which_mesh        `scale`: all of it
"""
