"""What the bytes of a step mean: for each module, and what would lower the peak.

history          bytes by category at any moment
module_stats     what each module needs, read off the timeline
gathered         what a rank has whole for a while of parameters that are divided
peak_owners      whose the bytes at the peak are, by module and category
advice           what would lower a peak, with bytes from its own trace
"""
