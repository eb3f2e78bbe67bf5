"""The command line: flags in, exit code out.

plain_option      how an option is written down
cluster_options   those that say which rank of which cluster a step is
output_options    those that say where a result is written
amount_options    those that say how much of it is shown
completions       what a shell offers when Tab is pressed
cli_options       every other option once, in objects
solver_options    those that say how a plan is found
compile_options   those about torch.compile
grid_options      those of several steps at once
list_options      those that take several values
cli_running       the one way in which a command runs: errors, progress, output
help_layout       help texts for the width that there is
help_text         what `trainfit --help` says
device_commands   those about machines and devices
fit_commands      the command that looks for what to change
grid_commands     those about several steps
scale_commands    those about what only a cluster decides
compile_commands  what plan and verify do with a compiled step
size_commands     max-batch, max-seq, and lists of batches and devices
commands          the other commands
"""
