"""The Hopper kernels, one idea a file; imports go downwards, in this order.

launch      `dense` and `grouped`: what XLA does around the one kernel
tables      the small kernel before a grouped product
legal       why a config can't run a problem
producer    the warp that loads
moves       operands of dense products that threads bring
weights     weights of groups that TMA can't address
consumer    a warpgroup that multiplies and stores
exchange    sums that the blocks of a cluster send each other
mainloops   which wgmmas a slab is
stores      from accumulators to memory
epilogue    what is added to them, and how it comes there
block       what the warpgroups of a block share
groups      work tiles of grouped products
schedule    work tiles, and those of dense products
plan        everything that follows from a problem and a config
matrices    of that, where matrices lie in global memory
tiling      of that, how the problem is cut up
layout      how matrices lie in memory
config      what tuning chooses
"""
