"""The Python API, which the command line calls: `predict`, `choose`, `prove`, each loaded when it is used."""
