"""A grid of steps as one table: what is asked, who works on it, what is kept, how it is written.

grid_file     a TOML file as the values of each axis; what is wrong with it, by key
grid_tasks    the rows of a grid as tasks, and the key under which a finished one is kept
row_runner    one row: a step on a device, as it is or with a plan
row_worker    a process that does rows for another one
local_crew    such processes on this machine
ray_crew      the same on a Ray cluster
dispatching   who does which row next, and what happens to the row of one that died
state_file    finished rows, kept line by line while others are still done
swept_table   the table as CSV or Parquet
swept_result  the answer, with its text and its JSON
sweep_grid    `sweep`
"""
