"""Graphs to order: random ones of several shapes, torch's own functions on them, and the optimum by trying."""
