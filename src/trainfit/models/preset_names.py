"""The names of the built-in models, for whoever cannot wait for torch; a test compares them to `catalog`."""

from __future__ import annotations

PRESET_NAMES = (
    *("gpt2-tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    *("llama-tiny", "tinyllama-1.1b", "llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3-405b"),
    *("mixtral-tiny", "mixtral-8x7b"),
    *("vit-tiny", "vit-b-16", "vit-l-16"),
    *("resnet-tiny", "resnet-18", "resnet-50"),
    *("bert-tiny", "bert-base", "bert-large"),
)
