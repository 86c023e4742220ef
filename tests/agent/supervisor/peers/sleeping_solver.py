"""A solver that reads its problem and never ends, for tests of what ends it."""

import sys
import time

sys.stdin.buffer.read()
time.sleep(600.0)
