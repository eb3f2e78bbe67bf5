"""What every other part builds on: units, errors shown to users, files, progress.

units            GiB, ms and counts: the only place where they exist
visible_text     names as they are shown: nothing unseen in them, not too long
count_text       10B tokens, 1.2M samples
user_errors      tells the user's mistakes from ours, shows only the user's frames
in_notebooks     results that a notebook shows as more than a line of text
doing            what is being done at the moment, told to whoever listens
other_python     a Python of its own that works for this one
decoding         JSON into dataclasses; says which value is not what it should be
sealed_files     JSON files with a schema number and a hash, written whole or not at all
compiled_cores   which files mypyc compiles, and whether what it made is of the files here
maximum_flow     the largest flow through a network and its minimum cut, for orders and plans
"""
