"""Published step times of public models: the rows, and how each is built as a step for `trainfit`."""
