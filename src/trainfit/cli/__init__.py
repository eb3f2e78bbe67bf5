"""The command line: flags in, exit code out.

plain_option     how an option is written down
cluster_options  those that say which rank of which cluster a step is
output_options   those that say where a result is written
amount_options   those that say how much of it is shown
completions      what a shell offers when Tab is pressed
cli_options      every option once, in objects
list_options     those that take several values
cli_running      the one way in which a command runs: errors, progress, output
help_text        what `trainfit --help` says
size_commands    max-batch, max-seq, and lists of batches and devices
commands         the other commands
"""
