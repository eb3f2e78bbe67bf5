"""What the bytes of a step mean: for each module, and what would lower the peak.

history          bytes by category at any moment
module_stats     what each module needs, read off the timeline
gathered         what a rank has whole for a while of parameters that are divided
peak_owners      whose the bytes at the peak are, by module and category
changed_steps    the trace of half a batch or of 16 bits, derived from this one
advice           what would lower a peak, with the bytes and seconds that are left
"""
