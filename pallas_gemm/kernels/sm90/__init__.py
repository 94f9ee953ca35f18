"""The Hopper kernels, one idea a file; imports go downwards.

launch      the kernel's operands and results; what XLA does around it
consumer    warpgroups that multiply, by a main loop (mainloops), and store
stores      from accumulators to memory, after the epilogue
producer    the warp that loads
block       what the warpgroups of a block share
groups      work tiles of grouped products; schedule: of all others
legal       why a config can't run a problem
plan        everything that follows from a problem and a config; what is of
            tiles and subtiles: tiling
layout      how matrices lie in memory
config      what tuning chooses
"""
