"""Files for viewers that people have already: PyTorch's memory_viz, Perfetto, spreadsheets.

shown_step       what is exported of a result: a step in memory and in time
op_frames        where in the step something happens, as a stack of frames
memory_snapshot  `--snapshot`: the allocator's history, as torch.cuda.memory._snapshot() has it
queue_slices     a step as slices on tracks, in nanoseconds
perfetto         `--perfetto`: the step in time, for ui.perfetto.dev and chrome://tracing
table_folder     files that are written into a folder together
csv_tables       `--csv`: every table of a result
"""
