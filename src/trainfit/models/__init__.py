"""Built-in models in plain PyTorch, and the usual training step around them.

`gpt2`, `llama`, `mixtral`, `bert`, `vit` and `resnet` have one family each, `losses` their loss. `catalog`
has the presets (`preset_names` their names, without torch), `recipe` makes the step, and `parallel` the
step of one of several ranks.
"""
