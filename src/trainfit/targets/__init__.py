"""What the user points at, as a function that builds a `Step`: `load` is the way in.

- `target`: `Target`, what leaves this part
- `parse`: which kind of target a text or an object is
- `built_in`: names of built-in models; `inputs`: their random inputs
- `huggingface`: configs of Hugging Face models; `huggingface_tasks`, `huggingface_inputs`: what they are
  trained for, and on what; `huggingface_layout`, `huggingface_stage`: how they are divided over a mesh
- `user_code`: functions of the user's own; `executed_code`: their files, as each rank executes them;
  `function_arguments`: what they are called with
- `cluster_mesh`: the mesh of `--mesh`, for both; `divided`: models of ours over it
- `given_values`: what `--set name=value` means
"""

from trainfit.targets.parse import load
from trainfit.targets.target import Target

__all__ = ["Target", "load"]
