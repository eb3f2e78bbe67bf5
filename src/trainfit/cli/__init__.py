"""The command line: flags in, exit code out.

cli_options      every option once, in objects
cli_running      the one way in which a command runs: errors, progress, output
commands         the commands
"""
