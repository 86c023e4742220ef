"""Run a script with torch seeded, and with no more than so many rounds of `itertools.count(n)`:
`run_seeded.py SCRIPT ROUNDS`.
"""

import itertools
import runpy
import sys

import torch

script, rounds = sys.argv[1], int(sys.argv[2])
endless = itertools.count
itertools.count = lambda first=0, step=1: iter(range(first, first + rounds)) if first == 1 else endless(first, step)
torch.manual_seed(0)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
