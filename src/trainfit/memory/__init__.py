"""What the bytes of a step mean: for each module, and what would lower the peak.

history          bytes by category at any moment
module_stats     what each module needs, read off the timeline
advice           what would lower a peak, with bytes from its own trace
"""
