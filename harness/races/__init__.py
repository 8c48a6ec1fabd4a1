"""mode=race: runs of several schemes train at the same time, in turns, until it is known which one is faster.

entries    what `engine=gpipe,ddp` or a file of schemes means: a run for each
race           start them one after the other, give them turns, end them
verdict        ratios with their intervals, ranks, how good the predicted order was
table          the live table, the closing table
picture        race.png
"""
