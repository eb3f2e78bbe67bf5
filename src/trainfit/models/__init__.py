"""Built-in models in plain PyTorch: one file per family; `catalog` names them, `recipe` trains them."""
