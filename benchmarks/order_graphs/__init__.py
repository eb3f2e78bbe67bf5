"""Graphs to order: random ones of several shapes, torch's functions on them, the optimum by trying."""
